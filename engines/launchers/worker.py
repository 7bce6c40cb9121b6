"""The two views of a worker: what it is told when it starts, and what its engine can ask of it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcore import spans
from rlcore.device import Device
from rlcore.engines.launchers.world import World
from rlcore.meta import real_device
from rlcore.registry import get_device


def _ignore(event: object) -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The facts that a worker gets. It owns one device, or drives several; its executor has ``world_size`` workers."""

    engine: str
    """Label of the engine, such as "the train engine"."""
    rank: int
    world_size: int
    device_name: str
    number: int
    """The number of the engine, counted by the process that starts it: the same on all ranks."""
    devices: tuple[str, ...] = ()
    """Names, in the user's process, of all devices that it drives; the first is ``device_name``."""
    local_name: str = ""
    """The name of ``device_name`` in the worker's own process, where the devices it drives are its first ones."""
    store: str = ""
    """The folder through which the workers find each other: no port is opened to the network."""
    host: str = field(default_factory=socket.gethostname)
    """The name of the host on which it runs."""
    emit: Callable[[Any], None] = _ignore
    """Sends plain data, such as progress, to the caller that waits for the present call."""
    is_cancelled: Callable[[], bool] = _never
    """Returns True when nobody waits for the present call any more, such as after Ctrl-C: it may end early."""
    world: World = field(default_factory=World, repr=False, compare=False)

    @property
    def device(self) -> Device:
        return get_device(self.local_name or self.device_name)

    @property
    def where(self) -> str:
        return f"rank {self.rank} ({self.device_name}) of {self.engine}"

    def process_group(self, timeout_s: float) -> Any:
        """Return the torch.distributed group of these workers, all of whom must ask for it the first time.

        It is the default group within this worker's methods, and destroyed when the worker is closed. One that
        torchrun's user has made already is used, and left as it is.
        """
        return self.world.default_group(self, timeout_s)

    def close_listeners(self, timeout_s: float) -> None:
        """Have gloo's groups that these workers have made take no connection any more; all of them call it together."""
        self.world.close_listeners(self, timeout_s)

    @property
    def joins_torchrun(self) -> bool:
        """The world is one that torchrun started."""
        return self.world_size > 1 and not self.store

    @contextlib.contextmanager
    def running(self, method: str) -> Iterator[None]:
        """Put the worker's world in place while one of its methods runs, which is a phase in traces."""
        phase = self.device.profiler.range(f"{method} of {self.engine}")
        with real_device(), self.world.in_place(self), self._traced(method), phase:
            yield

    def _traced(self, method: str) -> AbstractContextManager[object]:
        if spans.recorder is None:
            return spans.NO_SPAN
        from rlcore.engines.launchers.traced_calls import worker_span

        return worker_span(spans.recorder, self, method)


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """The call that a worker process runs, or has just been sent."""

    engine: str
    method: str
    timeout_s: float
    since: float
    """``time.monotonic()`` when it was sent, or the call before it ended."""
    answer: Future[Any]

    @property
    def remaining_s(self) -> float:
        return self.since + self.timeout_s - time.monotonic()


class WorkerHandle(Protocol):
    """A worker as the user's process sees it, wherever it runs.

    The side that runs the worker makes it within ``context.running("start")``, calls its methods one at a time, each
    within ``context.running(method)``, and ends with ``close`` and ``context.world.destroy()``.
    """

    context: WorkerContext

    @property
    def process_id(self) -> int:
        """The number of the worker's process on its host."""

    @property
    def process(self) -> str:
        """The ``process_name`` of the worker's process. Workers of one process can work on each other's tensors."""

    @property
    def is_stopped(self) -> bool:
        """The process is known to be stopped (SIGSTOP)."""

    def call(self, method: str, *args: object, **kwargs: object) -> Future[Any]:
        """Call a method of the worker, or of one of its attributes ("module.step"); calls run in their order.

        A handle among the arguments arrives as the worker itself; both must be of one process.
        The future raises rlcore's own errors as they were, with a note naming the rank, and WorkerError for others.

        Raises:
            InvalidInputError: an argument cannot be sent.
        """

    def prepare(
        self,
        method: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        on_event: Callable[[Any], None] | None,
        timeout_s: float,
    ) -> Callable[[], Future[Any]]:
        """Check and encode the arguments of a call; return a function that makes the call.

        Args:
            on_event: gets what the method emits; it is called in any thread.
            timeout_s: how long the call may run, for callers that wait behind it.
        """

    def cancel(self, answer: Future[Any]) -> None:
        """Tell the worker that nobody waits for this call any more. The call still runs, and may end early."""

    @property
    def current(self) -> CurrentCall | None:
        """The call that runs now, of whichever engine; None when there is none, or it cannot be known."""

    def stack(self) -> str:
        """Return the stack of the worker's thread, or words that say why it cannot be seen."""

    def ask_to_stop(self) -> None:
        """Let it end after the calls it already has."""

    def kill(self, because: str) -> None:
        """End its process now; ``because`` is what workers of other engines in it are told."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; return False if it still runs."""
