"""The connection of a device's library, in a thread of its own: the library has no deadline for it.

NCCL returns from it when all ranks are connected. A rank that has failed there, or that takes another kind of memory,
leaves another rank waiting inside NCCL for good, where neither an error nor Ctrl-C reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from rlcore.deadline import begin


class StillConnectingError(RuntimeError):
    """The library has not connected yet."""


class Connecting:
    """Connects at once, and is waited for as torch's ``Work`` is. A thread that never returns is left behind."""

    def __init__(self, connect: Callable[[], object]) -> None:
        self._thread, self._outcomes = begin(connect)

    def wait(self, timeout: timedelta) -> None:
        """Wait until it is connected; raises StillConnectingError after ``timeout``, or what the library raised."""
        self._thread.join(timeout.total_seconds())
        if not self._outcomes:
            raise StillConnectingError
        self._outcomes[0].get()

    def is_completed(self) -> bool:
        return bool(self._outcomes)
