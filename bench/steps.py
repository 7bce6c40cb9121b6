"""The steps of a case that takes minutes, told while it runs: one that is ended early says where it was."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def begin(step: str) -> None:
    """Say what comes next, in a few words."""
    for listener in _listeners:
        listener(step)


def listen(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with every step from now on, in this process."""
    _listeners.append(listener)
