"""The handle that ``TrainEngine.save(folder, blocking=False)`` returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rlcore.engines.checkpoints.manifest import committed
from rlcore.errors import CheckpointError, RlcoreError, StateError, first_line

_POLL_S = 0.05


class PendingSave:
    """A save that runs in the background."""

    def __init__(
        self, folder: Path, data: str, is_over: Callable[[], list[bool]], end: Callable[[bool], list[float | None]]
    ) -> None:
        """Follow a save that has begun.

        Args:
            data: name of the checkpoint's data in ``folder``.
            is_over: asks all workers if theirs has ended.
            end: waits for all workers; returns the seconds of each. Takes ``ends_stopped`` of ``settle``.
        """
        self.folder = folder
        self._data = data
        self._is_over, self._end = is_over, end
        self._seconds: float | None = None
        self._error: CheckpointError | None = None
        self._was_seen = False

    def done(self) -> bool:
        """Return True if it has ended, well or not."""
        if not self._has_ended:
            try:
                return all(self._is_over())
            except RlcoreError as error:
                self._workers_ended(error)
        return True

    def result(self, timeout_s: float | None = None) -> float:
        """Wait for its end; return the seconds from the call of ``save`` until the checkpoint was complete.

        They are not a number (NaN) if the workers were killed just after that.

        Args:
            timeout_s: raise TimeoutError after so long; the save goes on.

        Raises:
            CheckpointError: it could not be written; the previous checkpoint is intact.
        """
        if timeout_s is not None:
            self._wait(timeout_s)
        self.settle()
        if self._error is not None:
            self._was_seen = True
            raise self._error
        assert self._seconds is not None
        return self._seconds

    wait = result
    """The name that torch's futures have for it."""

    def settle(self, *, ends_stopped: bool = False) -> None:
        """Wait for its end; an error of the save is kept, not raised.

        Args:
            ends_stopped: do not wait for workers that stay stopped; all are ended then.
        """
        if self._has_ended:
            return
        try:
            self._seconds = max(seconds for seconds in self._end(ends_stopped) if seconds is not None)
        except CheckpointError as error:
            self._error = error
        except RlcoreError as error:
            self._workers_ended(error)

    def _workers_ended(self, error: RlcoreError) -> None:
        """Record the end of the save by the end of its workers, of which a call has raised ``error``."""
        last = committed(self.folder)
        if last == self._data:
            self._seconds = float("nan")
            return
        if isinstance(error, StateError) and isinstance(error.__cause__, RlcoreError):  # an earlier call had found it
            error = error.__cause__
        kept = "the one before it is intact" if last else "there is none before it"
        self._error = CheckpointError(f"the checkpoint {self.folder} was not written: {first_line(error)}; {kept}")
        self._error.__cause__ = error

    @property
    def unseen_error(self) -> CheckpointError | None:
        """The error of a failed save that ``result`` has not raised yet."""
        return None if self._was_seen else self._error

    @property
    def has_succeeded(self) -> bool:
        return self._seconds is not None

    @property
    def _has_ended(self) -> bool:
        return self._seconds is not None or self._error is not None

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the save to {self.folder} has not ended within {timeout_s:g} s; it goes on")
            time.sleep(_POLL_S)
