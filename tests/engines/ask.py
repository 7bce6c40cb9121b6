"""Ask an engine's workers for what only a test wants to know."""

from __future__ import annotations

from typing import Any

from rlcore.engines.engine import Engine


def ask(engine: Engine, method: str, *arguments: Any) -> list[Any]:
    """Call a method of each worker's class, or of one of its attributes; results by rank."""
    (group,) = engine.executors
    return group.call(method, [(arguments, {})] * len(group.workers))
