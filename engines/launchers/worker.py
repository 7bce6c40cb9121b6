"""What a worker is told when it starts, and how its failures come back."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from rlcore.errors import RlcoreError, WorkerError


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker owns one device; its executor holds one full set of weights over ``world_size`` workers."""

    rank: int
    world_size: int
    device: Any


def as_engine_error(error: Exception, context: WorkerContext, method: str) -> Exception:
    """rlcore's own errors keep their class, with a note of where they arose; all others become a WorkerError."""
    if isinstance(error, RlcoreError):
        error.add_note(f"raised by {method}() on rank {context.rank} ({context.device.name})")
        return error
    return WorkerError(
        rank=context.rank,
        device=context.device.name,
        method=method,
        traceback="".join(traceback.format_exception(error)),
    )
