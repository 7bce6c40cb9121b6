"""The interface that a swap uses on the workers of an engine."""

from __future__ import annotations

from typing import Any, Protocol

from rlcore.engines.executors.worker import SwapPlan, Worker
from rlcore.engines.offload.transfer import Grant, Progress
from rlcore.types import OffloadReport


class SwapWorker(Protocol):
    """A worker that moves tags of its own and of other workers, all of one device and of one process.

    ``swap`` does everything in one call. When a swap spans several processes, each moves a part in every round:
    ``begin_swap``, then ``swap_step`` until nothing is left to move, then ``end_swap``. ``reverse_swap`` turns a swap
    around at any moment after ``begin_swap``; further steps bring everything back.
    """

    def swap(self, plan: SwapPlan, *workers: Any) -> list[OffloadReport]:
        """Move all tags of ``plan``, which names workers by their position in ``workers``; return a report of each."""

    def begin_swap(self, plan: SwapPlan, *workers: Any) -> Progress:
        """Check and reserve what the swap needs; nothing moves yet."""

    def swap_step(self, grant: Grant) -> Progress:
        """Move some blocks, within the device memory of ``grant``."""

    def reverse_swap(self) -> Progress:
        """Make the steps that follow bring everything back."""

    def end_swap(self, plan: SwapPlan, *, was_reversed: bool) -> list[OffloadReport]:
        """End the swap when nothing is left to move; return a report of each tag, none if it was reversed."""


_IMPLEMENTATION: type[SwapWorker] = Worker
"""The type checker compares the workers of all executors with the interface."""
