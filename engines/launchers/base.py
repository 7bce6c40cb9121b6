"""The interface of launchers: a launcher starts the workers of one executor, wherever they run.

A plugin registers another launcher with the hook ``rlcore_register_launchers``. ``Engine.build(launcher="its name")``
and ``rlcore.init(launcher=...)`` choose it. A launcher whose workers have processes of their own is made of these:

* ``worker.WorkerContext``: what a worker is told when it starts. ``worker.WorkerHandle``: what its engine asks of it.
* ``group.WorkerGroup``: the handles by rank. It is filled inside ``with group.starting():``, which holds back the calls
  of other engines, waits in the end until all workers are ready, and ends those that have started after an error.
* ``runtime_files.new_store()``: a folder of this host through which the workers of a group find each other.
* ``process.start_in_child(...)``: the handle of a worker in a child of this program, the one for its device.
* `HostedProcess`: a process that is no such child, such as one on another host. A launcher has a class of its own for
  it, as ``ray.remote_process.RemoteProcess`` is; ``process.ProcessWorker`` is the handle of a worker in it.

``process.ProcessLauncher`` puts them together.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.messages import Kind
from rlcore.engines.launchers.pending_calls import PendingCall
from rlcore.engines.launchers.worker import CurrentCall

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


class HostedProcess(Protocol):
    """A process of workers, on this host or another. It runs their calls one at a time, in the order they were made."""

    @property
    def pid(self) -> int:
        """Its number on its host."""

    @property
    def name(self) -> str:
        """Its ``process_name``, which no process of another host has."""

    @property
    def is_stopped(self) -> bool:
        """It is known to be stopped (SIGSTOP)."""

    @property
    def current(self) -> CurrentCall | None:
        """The call that runs now, of whichever engine; ``PendingCalls`` keeps it."""

    def prepare(
        self, kind: Kind, worker: int, arguments: tuple[object, object], pending: PendingCall
    ) -> Callable[[], Future[object]]:
        """Encode the call of a worker; return a function that makes it, and returns ``pending.future``.

        The tensors in the arguments must not change until the call is answered. When the process ends first, the
        future raises WorkerDiedError.

        Args:
            kind: "start", whose arguments are the worker's class and its context; "call"; or "close", its last one.
            worker: the number of the worker in this process.
            arguments: the call's positional arguments, and those by name.

        Raises:
            InvalidInputError: an argument cannot be sent.
        """

    def flush(self) -> None:
        """Send the calls that were made, where one message carries several."""

    def cancel(self, answer: Future[object]) -> None:
        """Tell the worker that nobody waits for this call any more. The call still runs, and is answered."""

    def stack(self) -> str:
        """Return the stack of the thread that runs calls, or words that say why it cannot be seen."""

    def forget(self, worker: int) -> None:
        """Forget a worker whose "close" was sent; the process ends after the last one."""

    def kill(self, because: str) -> None:
        """End it now with all that it has started; ``because`` is what workers of other engines in it are told."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end, if it has no worker any more; return False if it still runs then."""


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
        ranks, ``next(engine_numbers)``.

        Where workers start at the same time, handles are added inside ``with group.starting():``; each has a future
        ``started``, which ends when its worker is ready. No worker is left when one fails to start, or when the user
        interrupts the start.

        Raises:
            InvalidInputError: this launcher cannot run these workers.
            WorkerError: a worker failed to start.
        """
