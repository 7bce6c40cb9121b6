"""What a launcher is: it starts the workers of one executor, wherever they run.

A plugin registers another one with the hook ``rlcore_register_launchers``; ``Engine.build(launcher="its name")`` and
``rlcore.init(launcher=...)`` choose it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlcore.engines.launchers.group import WorkerGroup

engine_numbers = itertools.count(1)
"""Numbers of the engines that this process has started."""


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Where one worker runs."""

    devices: tuple[str, ...]
    """Names, in the user's process, of the devices that it drives, such as ("cuda:0",); most workers drive one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What an engine asks of the workers that it has started."""

    engine: str
    """Label of the engine, such as "the train engine"."""
    timeout_s: float
    """How long a call of a worker may take, its start included."""
    owns_process: bool = False
    """Each worker lives in a process of its own, where its devices are the first ones."""
    python: str = ""
    """Path of another interpreter for the workers; "" is the user's own."""


class Launcher(ABC):
    """Starts workers. One is made for each start; it keeps nothing."""

    gives_processes: ClassVar[bool] = False
    """Workers can have processes of their own, apart from the user's."""

    @abstractmethod
    def start(
        self, worker_class: type[object], placements: Sequence[WorkerPlacement], options: LaunchOptions
    ) -> WorkerGroup:
        """Start one worker for each placement, by rank, and wait until all are ready.

        Each ``WorkerGroup.workers`` entry is a `rlcore.engines.launchers.worker.WorkerHandle`. When a worker fails to
        start, or the user interrupts the start, none is left.

        Raises:
            InvalidInputError: this launcher cannot run these workers.
            WorkerError: a worker failed to start.
        """
