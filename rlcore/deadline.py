"""Calls with a deadline into code that may never return, raise anything, and replace the standard streams."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


@dataclass(slots=True)
class CallOutcome(Generic[T]):
    """The value that a call returned, or the error that it raised."""

    value: T | None = None
    error: BaseException | None = None
    """Any exception, SystemExit and TimeoutError included."""

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def outcomes_within(timeout_s: float, calls: Sequence[Callable[[], T]]) -> list[CallOutcome[T]]:
    """Make calls side by side, each in a daemon thread; those not done after ``timeout_s`` seconds are abandoned.

    Nothing that a call raises is raised here. ``sys.stdout`` and ``sys.stderr`` are afterwards what they were.
    """
    streams, end = (sys.stdout, sys.stderr), time.monotonic() + timeout_s
    begun = [begin(call) for call in calls]
    for thread, _ in begun:
        thread.join(max(0.0, end - time.monotonic()))
    sys.stdout, sys.stderr = streams
    late: CallOutcome[T] = CallOutcome(error=TimeoutError(f"it did not end within {timeout_s:g} s"))
    return [outcome[0] if outcome else late for _, outcome in begun]


def outcome_here(call: Callable[[], T]) -> CallOutcome[T]:
    """Make a call in this thread and without a deadline. Ctrl-C is raised."""
    try:
        return CallOutcome(call())
    except (Exception, SystemExit) as error:
        return CallOutcome(error=error)


def begin(call: Callable[[], T]) -> tuple[threading.Thread, list[CallOutcome[T]]]:
    """Make a call in a daemon thread; return the thread, and a list to which it adds the outcome."""
    found: list[CallOutcome[T]] = []

    def run() -> None:
        try:
            found.append(CallOutcome(call()))
        except BaseException as error:  # the caller's to judge
            found.append(CallOutcome(error=error))

    thread = threading.Thread(target=run, name=f"rlcore-{getattr(call, '__name__', 'call')}", daemon=True)
    thread.start()
    return thread, found


def call_within(timeout_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, run in a daemon thread, which is abandoned when it does not end in time.

    Raises:
        TimeoutError: after ``timeout_s`` seconds.
        BaseException: whatever the function raised, SystemExit included.
    """
    return outcomes_within(timeout_s, [lambda: function(*arguments)])[0].get()
