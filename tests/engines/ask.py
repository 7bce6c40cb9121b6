"""Ask an engine's workers for what only a test wants to know."""

from __future__ import annotations

from typing import Any

from rlcore.engines.engine import Engine
from rlcore.engines.launchers.group import WorkerGroup


def ask(engine: Engine, method: str, *arguments: Any) -> list[Any]:
    """Call a method of each worker's class, or of one of its attributes; results by rank."""
    (group,) = engine.executors
    return ask_all(group, method, *arguments)


def ask_all(group: WorkerGroup, method: str, *arguments: Any, **named: Any) -> list[Any]:
    """Call a method of each worker of a group; results by rank."""
    return group.call(method, [(arguments, named)] * len(group.workers))
