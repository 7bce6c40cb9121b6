"""Ctrl-C: the first ends the run after the current step; a second, or one before the first step, ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from rlcore.errors import one_line


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The run stopped between steps, with everything saved."""


class Interrupt:
    """A context in which the first SIGINT only sets ``is_requested``, if there is anything to save."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._ends_at_once = False
        self._makes_steps = False
        self.is_requested = False
        """The user wants the run to end after the present step."""

    def begin_steps(self) -> None:
        """From here on the run makes steps, and checks ``is_requested`` after each."""
        self._makes_steps, self._ends_at_once = True, False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, _: object, error: BaseException | None, where: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)
        if self._ends_at_once and isinstance(error, Exception) and not isinstance(error, Interrupted):
            # What is closed amid its work may fail, and libraries raise their own errors for Ctrl-C.
            self._say(f"what was interrupted ended with {one_line(error)}")
            raise KeyboardInterrupt from error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested or not self._makes_steps:
            self._ends_at_once = True
            raise KeyboardInterrupt
        self.is_requested = True
        self._say("stopping after this step; press Ctrl-C again to stop at once")
