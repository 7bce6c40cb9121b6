"""Start the workers of one executor, by launcher.

inline     in the user's process
process    in children of the user's process, one for each device of this host
torchrun   in the user's process, as this rank's worker of a world that torchrun started
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.inline import InlineWorker
from rlcore.engines.launchers.process import ProcessWorker, process_for
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError
from rlcore.settings import Settings

LAUNCHERS = ("inline", "process", "torchrun")


def choose_launcher(asked: str | None, num_workers: int) -> str:
    """``asked``, else "inline" for one worker and "process" for more; ``RLCORE_DEBUG=pdb`` forces "inline"."""
    if asked is not None and asked not in LAUNCHERS:
        raise InvalidInputError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {asked!r}")
    if Settings.from_env().debug == "pdb":
        return "inline"
    return asked or ("inline" if num_workers == 1 else "process")


def start_workers(
    worker_class: Any, engine: str, device_names: list[str], *, launcher: str, timeout_s: float
) -> WorkerGroup:
    """Start one worker a device and wait until all are ready.

    Raises:
        InvalidInputError: this launcher cannot run so many workers, or torchrun's variables are absent.
        WorkerError: a worker failed to start; all are ended.
    """
    if launcher == "torchrun":
        return WorkerGroup([InlineWorker(worker_class, _torchrun_context(engine, device_names))], timeout_s)
    world_size = len(device_names)
    store = _new_store() if world_size > 1 else ""
    contexts = [WorkerContext(engine, rank, world_size, name, store) for rank, name in enumerate(device_names)]
    if launcher == "inline":
        if world_size > 1:
            raise InvalidInputError(f"launcher 'inline' runs one worker, and {engine} has {world_size}; use 'process'")
        return WorkerGroup([InlineWorker(worker_class, contexts[0])], timeout_s)
    environment = _environment(device_names)
    workers = [
        ProcessWorker(process_for(context.device_name, environment), worker_class, context) for context in contexts
    ]
    group = WorkerGroup(workers, timeout_s, store)
    group.wait_until_started([worker.started for worker in workers])
    return group


def _environment(device_names: list[str]) -> dict[str, str]:
    """Workers on the CPU divide its processors: each with as many threads as there are would hold the others up."""
    on_cpu = [name for name in device_names if name.startswith("cpu")]
    if not on_cpu or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // len(on_cpu)))}


def _new_store() -> str:
    folder = Settings.from_env().runtime
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(folder / f"store-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _torchrun_context(engine: str, device_names: list[str]) -> WorkerContext:
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise InvalidInputError(f"launcher 'torchrun' needs the variables torchrun sets; absent: {', '.join(missing)}")
    kind = device_names[0].partition(":")[0]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return WorkerContext(engine, rank, world_size, f"{kind}:{os.environ['LOCAL_RANK']}")
