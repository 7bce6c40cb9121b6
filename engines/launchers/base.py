"""The interface of launchers: a launcher starts the workers of one executor, wherever they run.

A plugin registers another launcher with the hook ``rlcore_register_launchers``. ``Engine.build(launcher="its name")``
and ``rlcore.init(launcher=...)`` choose it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlcore.engines.launchers.group import WorkerGroup

engine_numbers = itertools.count(1)
"""Numbers of the engines that this process has started."""


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """The devices of one worker."""

    devices: tuple[str, ...]
    """Names, in the user's process, of the devices that it drives, such as ("cuda:0",); most workers drive one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options with which an engine starts its workers."""

    engine: str
    """Label of the engine, such as "the train engine"."""
    timeout_s: float
    """How long a call of a worker may take, its start included."""
    owns_process: bool = False
    """Each worker lives in a process of its own, where its devices are the first ones."""
    python: str = ""
    """Path of another interpreter for the workers; "" is the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine on which a launcher can start workers. Its devices have names such as "host-a/cuda:0"."""

    name: str
    address: str
    """Its IP address."""
    counts: Mapping[str, int]
    """The number of its devices of each kind: {"cuda": 8, "cpu": 64}."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Words about it, such as {"rack": "r7", "ray.io/gpu-domain": "nvl-3"}."""


class Launcher(ABC):
    """Starts workers. A launcher is made for each start, and keeps nothing."""

    gives_processes: ClassVar[bool] = False
    """Workers can have processes of their own, apart from the user's."""

    @classmethod
    def hosts(cls) -> Sequence[Host]:
        """Return the hosts on which workers can run.

        None: they run on the host of the user's process, whose devices have names without a host, such as "cuda:0".
        """
        return ()

    @abstractmethod
    def start(
        self, worker_class: type[object], placements: Sequence[WorkerPlacement], options: LaunchOptions
    ) -> WorkerGroup:
        """Start one worker for each placement, by rank, and wait until all are ready.

        The group is ``WorkerGroup(options.engine, options.timeout_s, store)``. Through the folder ``store``
        (``runtime_files.new_store``; "" where there is one worker) the workers find each other; the group removes it in
        the end. To its ``workers`` a `rlcore.engines.launchers.worker.WorkerHandle` is added for each rank. A worker is
        made where it will live, by ``worker_class(context)``: its ``WorkerContext`` has the same ``number`` on all
        ranks, ``next(engine_numbers)``. ``group.wait_until_started`` waits for all.

        When a worker fails to start, or the user interrupts the start, ``group.stop()`` ends those that have started.

        Raises:
            InvalidInputError: this launcher cannot run these workers.
            WorkerError: a worker failed to start.
        """
