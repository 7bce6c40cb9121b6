"""A thread that waits for work with one other rank, so that Ctrl-C ends the caller's wait at once.

Gloo cannot be asked whether such work is done, and a wait for it that times out ends the connections of all ranks. To
start a thread takes longer than a small message, so one is kept for the next wait.
"""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta

from torch.distributed import Work


class WaitingThread:
    """A thread for one work after the other. It ends with ``end()``, or when nobody refers to it any more."""

    def __init__(self) -> None:
        self._slot = _Slot()
        threading.Thread(target=self._slot.serve, name="rlcore-collective-wait", daemon=True).start()
        self.end = weakref.finalize(self, self._slot.end)
        """End the thread once the work that it waits for has ended."""
        self.end.atexit = False

    def begin(self, work: Work, timeout_s: float) -> None:
        """Start to wait for ``work``; the one before has ended."""
        self._slot.begin(work, timeout_s)

    def is_done(self, poll_s: float) -> bool:
        """Return True once the work has ended, after ``poll_s`` seconds at most."""
        return self._slot.done.acquire(timeout=poll_s)

    @property
    def error(self) -> RuntimeError | None:
        """The error of the work that has ended last."""
        return self._slot.error


class _Slot:
    """The state that the thread shares with its owner. Locks hand over faster than queues or events."""

    def __init__(self) -> None:
        self.begun, self.done = threading.Lock(), threading.Lock()
        self.begun.acquire()
        self.done.acquire()
        self.error: RuntimeError | None = None
        self._next: tuple[Work, timedelta] | None = None
        self._is_last = False

    def begin(self, work: Work, timeout_s: float) -> None:
        self._next = (work, timedelta(seconds=timeout_s))
        self.begun.release()

    def end(self) -> None:
        self._is_last = True
        if self.begun.locked():  # else the thread is about to take its last work
            self.begun.release()

    def serve(self) -> None:
        while True:
            self.begun.acquire()
            if self._next is None:
                return
            (work, timeout), self._next = self._next, None
            self.error = None
            try:
                work.wait(timeout)
            except RuntimeError as error:
                self.error = error
            del work  # it has the tensor
            self.done.release()
            if self._is_last:
                return
