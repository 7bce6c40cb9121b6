"""The caching allocator of torch's accelerators, without memory: what it would hold after the same calls.

It rounds requests, takes segments from the device, splits them into blocks and joins what is freed, as
``c10/core/CachingDeviceAllocator`` and ``c10/cuda/CUDACachingAllocator.cpp`` do with their default settings.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Protocol

from rlcore.errors import RlcoreError

_ROUND = 512
"""Bytes; every request is a multiple."""
_SMALL = 1 << 20
"""The largest request that comes from the pool of small blocks."""
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE_ALONE = 10 << 20
"""Requests from here on have a segment of their own, a multiple of ``_SMALL_SEGMENT``."""
_FIRST_PLACE = 1 << 47
"""Each segment lies below the ones before it, as the driver of NVIDIA's devices places them: of free blocks of one size
the lowest is taken, which is one of the newest segment."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    start: int
    """Its place; segments never overlap, and are not neighbours."""
    size: int
    is_small: bool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


@dataclass(slots=True)
class _FreeBlocks:
    """Free blocks in the order of size, then place."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        key = block.size, block.start
        bisect.insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = block.size, block.start
        del self.keys[bisect.bisect_left(self.keys, key)]
        del self.blocks[key]

    def smallest(self, size: int) -> Block | None:
        """Return the smallest block of at least ``size`` bytes."""
        at = bisect.bisect_left(self.keys, (size, -1))
        return self.blocks[self.keys[at]] if at < len(self.keys) else None


class PlannedMemoryError(RlcoreError):
    """The planned device has less memory than was asked for."""

    def __init__(self, nbytes: int, allocated: int, capacity: int) -> None:
        super().__init__(
            f"{nbytes} bytes are asked for, {allocated} are in tensors, and {capacity} are there in all; "
            "see rlcore plan for what fits"
        )


class Allocator(Protocol):
    """Counts what is allocated, and what is taken from the device for it."""

    allocated: int
    peak_allocated: int
    peak_reserved: int

    def allocate(self, nbytes: int) -> object: ...

    def free(self, block: object) -> None: ...

    def reset_peaks(self) -> None: ...


class PlainAllocator:
    """A host's: what is allocated is taken, and given back at once."""

    def __init__(self, capacity: int | None = None) -> None:
        self.allocated = self.peak_allocated = self.peak_reserved = 0
        self._capacity = capacity

    def allocate(self, nbytes: int) -> int:
        if self._capacity is not None and self.allocated + nbytes > self._capacity:
            raise PlannedMemoryError(nbytes, self.allocated, self._capacity)
        self.allocated += nbytes
        self.peak_allocated = self.peak_reserved = max(self.peak_allocated, self.allocated)
        return nbytes

    def free(self, block: object) -> None:
        assert isinstance(block, int)
        self.allocated -= block

    def reset_peaks(self) -> None:
        self.peak_allocated = self.peak_reserved = self.allocated


class CachingAllocator:
    """Blocks and segments as torch's allocator holds them.

    Args:
        capacity: the most bytes of segments; where they end, segments of which nothing is in use go back first.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._lowest = _FIRST_PLACE
        self._pools = {True: _FreeBlocks(), False: _FreeBlocks()}

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``, more than none."""
        size = -(-nbytes // _ROUND) * _ROUND
        is_small = size <= _SMALL
        pool = self._pools[is_small]
        block = pool.smallest(size)
        if block is None:
            block = self._segment(size, is_small=is_small)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= _ROUND if is_small else rest > _SMALL:
            self._split(block, size)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: object) -> None:
        assert isinstance(block, Block)
        self.allocated -= block.size
        block.is_free = True
        pool = self._pools[block.is_small]
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool.remove(other)
                self._join(block, other)
        pool.add(block)

    def empty_cache(self) -> None:
        """Give segments of which nothing is in use back to the device."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _segment(self, size: int, *, is_small: bool) -> Block:
        if is_small:
            size = _SMALL_SEGMENT
        elif size < _LARGE_ALONE:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self._capacity is not None and self.reserved + size > self._capacity:
            self.empty_cache()
            if self.reserved + size > self._capacity:
                raise PlannedMemoryError(size, self.allocated, self._capacity)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._lowest -= size
        return Block(self._lowest, size, is_small)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.start + size, block.size - size, block.is_small, block, block.after, is_free=True)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._pools[block.is_small].add(rest)

    @staticmethod
    def _join(block: Block, other: Block) -> None:
        if other is block.before:
            block.start, block.before = other.start, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size
