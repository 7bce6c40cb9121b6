"""A set of storages leaves its device: its bytes are packed into host blocks, and the storages are freed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from rlcore._torch_private import storage_key
from rlcore.engines.offload.chunks import Chunk, StorageRange
from rlcore.engines.offload.host_arena import HostBlock, aligned


class DeviceToHost:
    """The copy of one set of storages to the host."""

    def __init__(self, chunks: deque[Chunk], ranges: Iterable[StorageRange], *, frees: bool = True) -> None:
        """Plan the copy of ``ranges``; every chunk that has been copied is appended to ``chunks``.

        Args:
            frees: free each storage when its last byte has left; False copies and leaves the storages as they are.
        """
        self.chunks = chunks
        self._frees = frees
        self._unpacked = deque(ranges)
        self._uncopied: Counter[int] = Counter()  # storage -> bytes that must leave before it is freed
        for part in self._unpacked:
            self._uncopied[storage_key(part.storage)] += part.nbytes
        self.remaining_bytes = sum(aligned(part.nbytes) for part in self._unpacked)
        """The host memory that the ranges not packed yet need."""
        self.largest_bytes = max((part.storage_bytes for part in self._unpacked), default=0)
        self.moved_bytes = self.freed_bytes = 0
        self.is_pinned = True

    @property
    def is_done(self) -> bool:
        return not self._uncopied

    def pack(self, block: HostBlock) -> Chunk:
        """Return the next chunk: as many bytes as the block holds."""
        chunk = Chunk(block, [])
        room = block.nbytes
        while self._unpacked and room:
            part = self._unpacked.popleft()
            if part.nbytes > room:
                rest = StorageRange(part.storage, part.storage_bytes, part.start + room, part.nbytes - room)
                self._unpacked.appendleft(rest)
                part = StorageRange(part.storage, part.storage_bytes, part.start, room)
            chunk.ranges.append(part)
            room -= aligned(part.nbytes)
            self.remaining_bytes -= aligned(part.nbytes)
        return chunk

    def complete(self, chunk: Chunk) -> None:
        """Record that the bytes of ``chunk`` are in host memory, and free the storages that are there whole."""
        self.chunks.append(chunk)
        self.moved_bytes += chunk.nbytes
        self.is_pinned &= chunk.block is not None and chunk.block.is_pinned
        for part in chunk.ranges:
            self._uncopied[storage_key(part.storage)] -= part.nbytes
            if not self._uncopied[storage_key(part.storage)]:
                del self._uncopied[storage_key(part.storage)]
                if self._frees:
                    part.storage.resize_(0)
                    self.freed_bytes += part.storage_bytes
