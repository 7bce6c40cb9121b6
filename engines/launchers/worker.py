"""What a worker is told when it starts, what its engine can ask of it, and how its failures come back."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

import rlcore.errors
from rlcore.device import Device
from rlcore.engines.launchers.wire import dump_answer, load_answer
from rlcore.engines.launchers.world import World
from rlcore.errors import InvalidInputError, RlcoreError, WorkerError, one_line
from rlcore.meta import real_device
from rlcore.registry import get_device

_LONGEST_TEXT = 50_000


def _ignore(event: Any) -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker owns one device, or drives several; its executor has ``world_size`` workers."""

    engine: str
    """Label of the engine, such as "the train engine"."""
    rank: int
    world_size: int
    device_name: str
    number: int
    """Of the engine, counted by the process that starts it: the same on all ranks."""
    devices: tuple[str, ...] = ()
    """Names, in the user's process, of all devices that it drives, the first being ``device_name``."""
    local_name: str = ""
    """What the worker's own process calls ``device_name``, where the devices it drives are its first ones."""
    store: str = ""
    """Folder through which the workers find each other: no port is opened to the network."""
    host: str = field(default_factory=socket.gethostname)
    """Name of the host on which it runs."""
    emit: Callable[[Any], None] = _ignore
    """Send plain data to whoever waits for the present call, such as progress."""
    is_given_up: Callable[[], bool] = _never
    """Nobody waits for the present call any more, such as after Ctrl-C: a long one may end early."""
    world: World = field(default_factory=World, repr=False, compare=False)

    @property
    def device(self) -> Device:
        return get_device(self.local_name or self.device_name)

    @property
    def where(self) -> str:
        return f"rank {self.rank} ({self.device_name}) of {self.engine}"

    def process_group(self, timeout_s: float) -> Any:
        """The torch.distributed group of these workers, all of whom must ask for it the first time.

        It is the default group within this worker's methods, and destroyed when the worker is closed. One that
        torchrun's user has made already is used, and left as it is.
        """
        return self.world.default_group(self, timeout_s)

    @property
    def joins_torchrun(self) -> bool:
        """The world is one that torchrun started."""
        return self.world_size > 1 and not self.store

    @contextlib.contextmanager
    def turn(self, method: str) -> Iterator[None]:
        """In force while a method of this worker runs, which is a phase in traces."""
        with real_device(), self.world.in_place(self), self.device.profiler.range(f"{method} of {self.engine}"):
            yield


@dataclass(frozen=True, slots=True)
class Current:
    """A call that a worker process executes, or has just been sent."""

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
    """A worker as the user's process sees it, wherever it runs."""

    context: WorkerContext

    @property
    def process_id(self) -> int:
        """Workers of one process can work on each other's tensors."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the worker, or of one of its attributes ("module.step"); calls run in their order.

        A handle among the arguments arrives as the worker itself; both must be of one process.
        The future raises rlcore's own errors as they were, with a note naming the rank, and WorkerError for others.

        Raises:
            InvalidInputError: an argument cannot be sent.
        """

    def prepare(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        on_event: Callable[[Any], None] | None,
        timeout_s: float,
    ) -> Callable[[], Future[Any]]:
        """What makes that call: all that can be wrong with its arguments is found before.

        Args:
            on_event: for what the method emits; called in any thread.
            timeout_s: how long it may run, for those who wait behind it.
        """

    def give_up(self, answer: Future[Any]) -> None:
        """Nobody waits for this call any more. It keeps its turn, and may end early."""

    @property
    def current(self) -> Current | None:
        """The call that runs now, of whichever engine; None when there is none, or no telling."""

    def stack(self) -> str:
        """What the worker is doing, or why that cannot be seen."""

    def ask_to_stop(self) -> None:
        """Let it end after the calls it already has."""

    def kill(self, because: str) -> None:
        """End its process now; ``because`` is what workers of other engines in it are told."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False if it still lives."""


class Failure(msgspec.Struct, array_like=True):
    """An exception on its way from a worker process."""

    kind: str
    """Name of a class in ``rlcore.errors``; "" for any other exception."""
    message: str
    in_one_line: str
    traceback: str
    attributes: dict[str, bytes]
    """Of rlcore's own errors: those that are plain data, as ``dump_answer`` writes it."""


def describe(error: BaseException) -> Failure:
    """Plain data about an exception raised in a worker."""
    is_ours = vars(rlcore.errors).get(type(error).__name__) is type(error)
    attributes = dict(_plain_attributes(error)) if is_ours else {}
    return Failure(
        kind=type(error).__name__ if is_ours else "",
        message=_bounded(_text(error)),
        in_one_line=_bounded(one_line(error)),
        traceback=_bounded("".join(traceback.format_exception(error))),
        attributes=attributes,
    )


def _plain_attributes(error: BaseException) -> Iterator[tuple[str, bytes]]:
    for name, value in vars(error).items():
        with contextlib.suppress(InvalidInputError):
            body, tensors = dump_answer(value, name)
            if not tensors:
                yield name, body


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # a user's __str__
        return f"<its text cannot be had: {failed!r}>"


def _bounded(text: str) -> str:
    """Both ends of a text that nobody would read whole; characters that UTF-8 does not have are replaced."""
    half = _LONGEST_TEXT // 2
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text.encode(errors="replace").decode()


def raised(failure: Failure, context: WorkerContext, method: str) -> Exception:
    """The error of the user's process: rlcore's own keep their class, all others become a WorkerError.

    The worker's traceback is a note on it, or part of the WorkerError's text.
    """
    if not failure.kind:
        return WorkerError(
            rank=context.rank,
            device=context.device_name,
            method=method,
            error=failure.in_one_line,
            traceback=failure.traceback,
        )
    kind: type[RlcoreError] = getattr(rlcore.errors, failure.kind)
    error = kind.__new__(kind, failure.message)
    error.args = (failure.message,)  # those that are an OSError too leave it to __init__
    error.__dict__.update({name: load_answer(body, [], Any) for name, body in failure.attributes.items()})
    error.add_note(f"raised by {method}() on {context.where}:\n{failure.traceback}")
    return error
