"""Choose a launcher by name and start the workers of one executor with it."""

from __future__ import annotations

from typing import Any

from rlcore.engines.launchers.base import Launcher, LaunchOptions, WorkerPlacement
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.registry import launcher_class, launcher_names
from rlcore.settings import Settings


def choose_launcher(
    asked: str | None, num_workers: int, *, owns_process: bool = False, joins_torchrun: bool = False
) -> str:
    """Return ``asked``, else "inline" for one worker and "process" for more; ``RLCORE_DEBUG=pdb`` forces "inline".

    Workers that need processes of their own have "process"; those that say so may be torchrun's ranks instead.
    """
    if asked is not None and asked not in launcher_names():
        raise InvalidInputError(f"launcher must be one of {', '.join(launcher_names())}, got {asked!r}")
    if owns_process:
        if asked is None or launcher_class(asked).gives_processes or (asked == "torchrun" and joins_torchrun):
            return asked or "process"
        raise UnsupportedError(
            f"launcher {asked!r} for an executor whose workers need processes of their own",
            "use 'process', or leave the launcher out of build() and rlcore.init()",
        )
    if Settings.from_env().debug == "pdb":
        return "inline"
    return asked or ("inline" if num_workers == 1 else "process")


def start_workers(
    worker_class: type[Any],
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
    each = range(0, len(device_names), devices_each)
    placements = [WorkerPlacement(tuple(device_names[at : at + devices_each])) for at in each]
    options = LaunchOptions(engine=engine, timeout_s=timeout_s, owns_process=owns_process, python=python)
    chosen: Launcher = launcher_class(launcher)()
    return chosen.start(worker_class, placements, options)
