"""A set of storages comes back to its device: the storages are allocated again and filled, a chunk at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable

import torch

from rlcore._torch_private import storage_key
from rlcore.engines.offload.chunks import Chunk, StorageRange, host_bytes
from rlcore.engines.offload.device_to_host import DeviceToHost
from rlcore.engines.offload.host_arena import HostArena

_ROUNDED_TO = 512
"""Torch's allocator rounds the bytes of an allocation up to a multiple of this."""
_LARGEST_SMALL = 1 << 20
"""Torch takes allocations up to these bytes from segments of their own, of 2 MiB, never from a larger segment."""
_MOST_SEGMENTS = 7
"""A round of weight sync from four devices may open 32 handles (``bench/targets.toml``): these of a set, and one for
the small storages of each."""
_SMALLEST_SEGMENT = 1 << 30
_LITTLE = 1 / 64
"""The share of all bytes that may be given away for fewer segments of small storages."""


class HostToDevice:
    """The copy of one set of storages back to the device.

    With ``few_segments`` torch's allocator is made to take the device memory in a few large segments, in which all but
    the small storages then lie: other processes import segments, so that they import few. It is not one segment: the
    memory of a segment is free for other processes only when all storages in it have left again. Free memory that the
    allocator has cached would be used instead, so the caller empties the cache before. A storage of more than half of
    what torch calls small is allocated larger than that, because one or two of them would fill a small segment: key and
    value projections often have 1 MiB. Where it costs little memory, so is one of more than an eighth: the routers of a
    30B with experts, 48 of 512 KiB, would fill 12 segments.
    """

    def __init__(self, chunks: deque[Chunk], *, few_segments: bool = False) -> None:
        """Plan the copy of ``chunks``; every chunk that has been copied is removed from ``chunks``."""
        self.chunks = chunks
        self._waiting = deque(chunks)
        self._allocated: list[StorageRange] = []
        self._copied: list[StorageRange] = []
        self._without_values: list[Chunk] = []
        self.host_bytes = host_bytes(chunks)
        self.largest_bytes = max((part.storage_bytes for chunk in self._waiting for part in chunk.ranges), default=0)
        self.moved_bytes = self.allocated_bytes = 0
        self.is_pinned = all(chunk.block.is_pinned for chunk in chunks if chunk.block)
        self._grows_above = _grows_above(self._waiting) if few_segments else _LARGEST_SMALL
        self._outside_segments = deque(self._large_allocations(self._waiting) if few_segments else ())
        self._segment_bytes = max(_SMALLEST_SEGMENT, sum(self._outside_segments) // _MOST_SEGMENTS)
        self._free_segment_bytes = 0

    @property
    def is_done(self) -> bool:
        return not self.chunks

    @property
    def has_next(self) -> bool:
        return bool(self._waiting)

    @property
    def needs_segments(self) -> bool:
        """The allocator will be made to take more segments."""
        return bool(self._outside_segments)

    @property
    def next_bytes(self) -> int:
        """The device memory that the next chunk needs."""
        return sum(part.storage_bytes for part in self._absent())

    def next_chunk(self) -> Chunk:
        """Return the next chunk, its storages allocated.

        Raises whatever torch raises when there is no memory; nothing is allocated then.
        """
        absent = self._absent()
        if self.needs_segments:
            self._take_segments(sum(self._large_allocations(itertools.islice(self._waiting, 1))))
        try:
            for part in absent:
                part.storage.resize_(self._size_in_segment(part))
        except BaseException:
            for part in absent:
                part.storage.resize_(0)
            raise
        self._allocated += absent
        self.allocated_bytes += sum(part.storage_bytes for part in absent)
        return self._waiting.popleft()

    def _take_segments(self, nbytes: int) -> None:
        """Make the allocator take segments until ``nbytes`` of one are free, unless the device has no such segment."""
        device = self._waiting[0].ranges[0].storage.device
        while self._outside_segments and self._free_segment_bytes < nbytes:
            segment = 0
            while self._outside_segments and segment < self._segment_bytes:
                segment += self._outside_segments.popleft()
            with contextlib.suppress(RuntimeError):  # such as torch.OutOfMemoryError
                torch.empty(segment, dtype=torch.uint8, device=device)
            self._free_segment_bytes += segment
        self._free_segment_bytes -= nbytes

    def complete(self, chunk: Chunk, arena: HostArena) -> None:
        """Record that the bytes of ``chunk`` are on the device, and give its block back to the arena."""
        if chunk.block is None:
            self._without_values.append(chunk)
        else:
            self._copied += chunk.ranges
            self.moved_bytes += chunk.nbytes
            arena.give(chunk.block)
        self.chunks.remove(chunk)

    def reversed(self) -> DeviceToHost:
        """Return the copy that takes back what has come; storages without any copied byte are freed at once."""
        copied = {storage_key(part.storage) for part in self._copied}
        for part in self._allocated:
            if storage_key(part.storage) not in copied:
                part.storage.resize_(0)
        self.chunks += self._without_values
        return DeviceToHost(self.chunks, self._copied)

    def _large_allocations(self, chunks: Iterable[Chunk]) -> list[int]:
        """Return the bytes that each absent storage takes of a large segment, of those that lie in one."""
        absent = {
            storage_key(part.storage): -(-self._size_in_segment(part) // _ROUNDED_TO) * _ROUNDED_TO
            for chunk in chunks
            for part in chunk.ranges
            if _is_torchs(part) and not part.storage.nbytes()
        }
        return [nbytes for nbytes in absent.values() if nbytes > _LARGEST_SMALL]

    def _size_in_segment(self, part: StorageRange) -> int:
        """Return the bytes to allocate for its storage."""
        grows = _is_torchs(part) and self._grows_above < part.storage_bytes <= _LARGEST_SMALL
        return _LARGEST_SMALL + _ROUNDED_TO if grows else part.storage_bytes

    def _absent(self) -> list[StorageRange]:
        """Return the ranges of the next chunk whose storage has no memory; a chunk has one range of a storage."""
        return [part for part in self._waiting[0].ranges if not part.storage.nbytes()]


def _grows_above(chunks: Iterable[Chunk]) -> int:
    """Return the bytes above which small storages grow: half of the largest, or less where that adds few bytes."""
    always, perhaps = _LARGEST_SMALL // 2, _LARGEST_SMALL // 8
    parts = (part for chunk in chunks for part in chunk.ranges if _is_torchs(part))
    sizes = {storage_key(part.storage): part.storage_bytes for part in parts}.values()
    added = sum(_LARGEST_SMALL - size for size in sizes if perhaps < size <= always)
    return perhaps if added <= _LITTLE * sum(sizes) else always


def _is_torchs(part: StorageRange) -> bool:
    """Return True if torch's allocator owns the memory; other memory has an owner of its own."""
    return isinstance(part.storage, torch.UntypedStorage)
