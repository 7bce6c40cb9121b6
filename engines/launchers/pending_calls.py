"""The calls that a worker process has been sent and has not answered."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlcore.engines.launchers.answers import load_answer
from rlcore.engines.launchers.failures import WorkerFailure, raised
from rlcore.engines.launchers.messages import Kind
from rlcore.engines.launchers.worker import CurrentCall, WorkerContext
from rlcore.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that has not been answered."""

    context: WorkerContext
    method: str
    timeout_s: float
    expected: Any = None
    on_event: Callable[[Any], None] | None = None
    future: Future[Any] = field(default_factory=Future)

    def settle(self, kind: Kind, body: bytes, tensors: list[Any]) -> None:
        """Take what the worker says: an event, its error, or the result, which is decoded by the expected type."""
        if kind == "event":
            if self.on_event is not None:
                self.on_event(load_answer(body, tensors, Any))
        elif kind == "error":
            failure = msgspec.msgpack.decode(body, type=WorkerFailure)
            self.future.set_exception(raised(failure, self.context, self.method))
        else:
            try:
                value = load_answer(body, tensors, self.expected)
            except Exception as error:  # whatever msgspec says of an annotation, or of an answer unlike it
                self.future.set_exception(
                    InvalidInputError(f"{self.method}() is annotated to return {self.expected}: {error}")
                )
            else:
                self.future.set_result(value)


class PendingCalls:
    """The calls of one process, in the order in which it runs them: the first runs now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, PendingCall] = {}
        self._first_since = 0.0
        self._is_over = False

    def add(self, pending: PendingCall) -> int | None:
        """Return the number of the call; None when the process has ended, and takes none."""
        with self._lock:
            if self._is_over:
                return None
            if not self._calls:
                self._first_since = time.monotonic()
            number = next(self._numbers)
            self._calls[number] = pending
            return number

    @property
    def current(self) -> CurrentCall | None:
        with self._lock:
            first = next(iter(self._calls.values()), None)
            if first is None:
                return None
            return CurrentCall(first.context.engine, first.method, first.timeout_s, self._first_since, first.future)

    def numbers_of(self, answer: Future[Any]) -> list[int]:
        """Return the number of the call with this future, if it has not been answered."""
        with self._lock:
            return [number for number, pending in self._calls.items() if pending.future is answer]

    def settle(self, number: int, kind: Kind, body: bytes, tensors: list[Any]) -> None:
        """Give a call what the worker says of it; a call that is not known any more has had an error."""
        if kind != "event":
            self._take(number, lambda pending: pending.settle(kind, body, tensors))
            return
        with self._lock:
            pending = self._calls.get(number)
        if pending is None:
            return
        try:
            pending.settle(kind, body, tensors)
        except Exception as error:  # what cannot be decoded, or the listener's own
            self.fail(number, error)

    def fail(self, number: int, error: Exception) -> None:
        self._take(number, lambda pending: pending.future.set_exception(error))

    def _take(self, number: int, settle: Callable[[PendingCall], None]) -> None:
        """Settle a call, once."""
        with self._lock:
            pending = self._calls.pop(number, None)
            self._first_since = time.monotonic()
        if pending is not None:
            settle(pending)

    def end(self) -> list[PendingCall]:
        """Take no call any more; return those that will not be answered."""
        with self._lock:
            self._is_over = True
            left, self._calls = self._calls, {}
        return list(left.values())
