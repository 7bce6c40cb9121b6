"""Device memory kept apart under a tag, through torch's MemPool."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, final

import torch

from rlcore.errors import StateError
from rlcore.types import PoolStats


@final
class Pool:
    """The source of this thread's allocations inside ``with device.memory.pool(tag):``.

    A pool has no allocator of its own: its memory is the device's ordinary memory.
    """

    def __init__(self, tag: str, device: torch.device) -> None:
        self.tag = tag
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._pool: Any = None
        self._use: Any = None

    def stats(self) -> PoolStats:
        segments = [] if self._pool is None else self._pool.snapshot()
        mine = [segment for segment in segments if segment["device"] == self._device.index]
        return PoolStats(
            allocated_bytes=sum(segment["allocated_size"] for segment in mine),
            reserved_bytes=sum(segment["total_size"] for segment in mine),
        )

    def empty_cache(self) -> None:
        """Return the memory to the device if no tensor is in the pool."""
        if self._use is None and not self.stats().allocated_bytes:
            self._pool = None

    def __enter__(self) -> Self:
        """Enter the pool. Raises StateError inside a ``with`` of the same pool, in any thread."""
        if self._use is not None:
            raise StateError(f"the memory pool {self.tag!r} is in use; leave its other with-block first")
        if self._pool is None:
            with torch.accelerator.device_index(self._device.index):
                self._pool = self._module.MemPool()
        use = self._module.use_mem_pool(self._pool, self._device)
        use.__enter__()
        self._use = use
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        use, self._use = self._use, None
        use.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<memory pool {self.tag!r} of {self._device}>"
