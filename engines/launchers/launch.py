"""Start the workers of one executor, by launcher.

inline     in the user's process
process    in children of the user's process, one for each device of this host, or one for each worker that asks for it
torchrun   in the user's process, as this rank's worker of a world that torchrun started
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from rlcore.engines.launchers.group import WorkerGroup, sending
from rlcore.engines.launchers.inline import InlineWorker
from rlcore.engines.launchers.process import ProcessWorker
from rlcore.engines.launchers.traces import new_store
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.registry import get_device, launch
from rlcore.settings import Settings

LAUNCHERS = ("inline", "process", "torchrun")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
"""Collective libraries listen on the interface these name, else on one that the network reaches."""

_numbers = itertools.count(1)
"""Of the engines that this process has started."""


def choose_launcher(
    asked: str | None, num_workers: int, *, owns_process: bool = False, joins_torchrun: bool = False
) -> str:
    """``asked``, else "inline" for one worker and "process" for more; ``RLCORE_DEBUG=pdb`` forces "inline".

    Workers that need processes of their own have "process"; those that say so may be torchrun's ranks instead.
    """
    if asked is not None and asked not in LAUNCHERS:
        raise InvalidInputError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {asked!r}")
    if owns_process:
        if asked in (None, "process") or (asked == "torchrun" and joins_torchrun):
            return asked or "process"
        raise UnsupportedError(
            f"launcher {asked!r} for an executor whose workers need processes of their own",
            "use 'process', or leave the launcher out of build() and rlcore.init()",
        )
    if Settings.from_env().debug == "pdb":
        return "inline"
    return asked or ("inline" if num_workers == 1 else "process")


def start_workers(
    worker_class: Any,
    engine: str,
    device_names: list[str],
    *,
    launcher: str,
    timeout_s: float,
    devices_each: int = 1,
    owns_process: bool = False,
    python: str = "",
) -> WorkerGroup:
    """Start one worker a device, or one for ``devices_each`` of them, and wait until all are ready.

    A worker of several devices needs a process of its own, where they are the first and the others follow.
    ``python`` is another interpreter for them.

    Raises:
        InvalidInputError: this launcher cannot run so many workers, or torchrun's variables are absent.
        WorkerError: a worker failed to start; all are ended.
    """
    if launcher == "torchrun":
        return _start_inline(worker_class, _torchrun_context(engine, device_names), timeout_s)
    world_size = len(device_names)
    if launcher == "inline":
        if world_size > 1:
            cause = " (RLCORE_DEBUG=pdb forces it)" if Settings.from_env().debug == "pdb" else ""
            raise InvalidInputError(
                f"launcher 'inline'{cause} runs one worker, and {engine} has {world_size}; use 'process', or one worker"
            )
        return _start_inline(worker_class, WorkerContext(engine, 0, 1, device_names[0], next(_numbers)), timeout_s)
    shares = [tuple(device_names[at : at + devices_each]) for at in range(0, world_size, devices_each)]
    return _start_processes(worker_class, engine, shares, timeout_s, owns_process, python)


def _start_inline(worker_class: Any, context: WorkerContext, timeout_s: float) -> WorkerGroup:
    group = WorkerGroup(context.engine, timeout_s)
    group.workers.append(InlineWorker(worker_class, context))
    return group


def _start_processes(  # noqa: PLR0917
    worker_class: Any, engine: str, shares: list[tuple[str, ...]], timeout_s: float, owns_process: bool, python: str
) -> WorkerGroup:
    store, number = str(new_store()), next(_numbers)
    environment = _environment([name for share in shares for name in share], owns_process=owns_process) | os.environ
    group = WorkerGroup(engine, timeout_s, store)
    started = []
    try:
        with sending:
            for rank, devices in enumerate(shares):
                local, order = _in_front(devices) if owns_process else ("", {})
                context = WorkerContext(engine, rank, len(shares), devices[0], number, devices, local, store)
                worker = ProcessWorker(
                    worker_class, context, environment | order, timeout_s, owns_process=owns_process, python=python
                )
                group.workers.append(worker)
                started.append(worker.started)
        group.wait_until_started(started)
    except BaseException:  # Ctrl-C too: no worker is left
        group.stop()
        raise
    return group


def _environment(device_names: list[str], *, owns_process: bool) -> dict[str, str]:
    """Of a worker process, where the user's own does not say otherwise."""
    environment = dict.fromkeys(_INTERFACE_VARIABLES, "lo")
    on_host = all(launch(name).spec.is_host for name in device_names)
    if on_host or not owns_process:  # vLLM sets its own beside an accelerator
        # They divide the host's processors: each with as many threads as there are would hold the others up, also
        # those that only feed an accelerator.
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(device_names)))
    return environment


def _in_front(device_names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """What a process calls the first of these, where they are numbered first; and the variable that makes it so.

    It sees the others too, where they can come after these: what it is to read may lie on them.
    """
    kind = device_names[0].partition(":")[0]
    facts = launch(kind)
    first = [get_device(name).index for name in device_names]
    others = [index for index in range(get_device(device_names[0]).count()) if index not in first]
    order = facts.worker_environment(first if facts.spec.visible_devices_rise else [*first, *others])
    return (f"{kind}:0" if order else ""), order


def _torchrun_context(engine: str, device_names: list[str]) -> WorkerContext:
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise InvalidInputError(f"launcher 'torchrun' needs the variables torchrun sets; absent: {', '.join(missing)}")
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if len(device_names) not in (1, world_size):
        raise InvalidInputError(
            f"launcher 'torchrun' runs one worker a rank: {engine} has {len(device_names)} workers, this world has "
            f"{world_size} ranks"
        )
    if len(device_names) == 1:  # an engine of this rank alone
        kind = device_names[0].partition(":")[0]
        context = WorkerContext(engine, 0, 1, f"{kind}:{local_rank}", next(_numbers))
    else:
        context = WorkerContext(engine, rank, world_size, device_names[local_rank], next(_numbers))
    context.device.activate()
    return context
