"""What rlcore adds to vLLM's worker class, found by its dotted path. Nothing here needs Ray.

Its methods are called by name, with plain values and bytes, so that vLLM sends them as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlcore.engines.executors.vllm.share import Share
from rlcore.engines.residency import Move


class RlcoreWorkerExtension:
    """Mixed into ``vllm.v1.worker.gpu_worker.Worker`` and its like: every name is prefixed."""

    def rlcore_move(self, move: str, tag: str) -> dict[str, Any]:
        """Fields of the ``OffloadReport`` of one move of one tag."""
        return dataclasses.asdict(_share_of(self).move(Move(move), tag))

    def rlcore_memory(self) -> dict[str, Any]:
        """Fields of a ``MemoryReport``, and for each tag whether it is on the device."""
        return _share_of(self).memory()

    def rlcore_reserve(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        """As ``Worker.reserve_host_memory``."""
        _share_of(self).reserve(host_memory_bytes, reserve_host_bytes)

    def rlcore_reload(self, path: str) -> None:
        """Load the weights of a model folder into the live model."""
        _share_of(self).reload_folder(path)


def _share_of(worker: Any) -> Share:
    """Made at the first call: then the model is loaded and the KV cache is there."""
    found: Share | None = getattr(worker, "_rlcore_share", None)
    if found is None:
        found = worker._rlcore_share = Share(worker)
    return found
