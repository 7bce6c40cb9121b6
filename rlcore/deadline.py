"""Calls with a deadline into code that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def call_within(timeout_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, run in a daemon thread, which is abandoned when it does not end in time.

    Raises:
        TimeoutError: after ``timeout_s`` seconds.
        BaseException: whatever the function raised, SystemExit included.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except BaseException as error:  # raised below, in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name=f"rlcore-{getattr(function, '__name__', 'call')}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError(f"it did not end within {timeout_s:g} s")
    if errors:
        raise errors[0]
    return results[0]
