"""What a case that takes minutes is at, told while it runs: of one that is ended early it is known where it was."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def begin(step: str) -> None:
    """Say what comes next, in a few words."""
    for listener in _listeners:
        listener(step)


def listen(listener: Callable[[str], None]) -> None:
    """From now on, in this process."""
    _listeners.append(listener)
