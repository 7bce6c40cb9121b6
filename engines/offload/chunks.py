"""Chunks: the unit of an offload copy, ranges of storages that lie in one block of host memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.engines.offload.host_arena import HostArena, HostBlock, aligned
from rlcore.engines.offload.storages import bytes_of


@dataclass(frozen=True, slots=True)
class StorageRange:
    """A range of bytes of a storage."""

    storage: torch.UntypedStorage
    storage_bytes: int
    """The size of the whole storage while it is on its device."""
    start: int
    nbytes: int


def whole(storages: Iterable[torch.UntypedStorage]) -> list[StorageRange]:
    """Return the range of all bytes of each storage."""
    return [StorageRange(storage, storage.nbytes(), 0, storage.nbytes()) for storage in storages]


@dataclass(eq=False, slots=True)
class Chunk:
    """Ranges that lie in one host block, one after the other. Without a block their values are gone."""

    block: HostBlock | None
    ranges: list[StorageRange]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.ranges) if self.block else 0

    def pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return a view of each range in host memory, and a view of it on the device."""
        if self.block is None:
            return [], []
        ends = itertools.accumulate((aligned(part.nbytes) for part in self.ranges), initial=0)
        memory, first = self.block.tensor, self.block.tensor.storage_offset()
        return (
            [memory.as_strided((part.nbytes,), (1,), first + at) for part, at in zip(self.ranges, ends, strict=False)],
            [bytes_of(part.storage, part.start, part.nbytes) for part in self.ranges],
        )


def release_blocks(chunks: Iterable[Chunk], arena: HostArena) -> None:
    """Drop the values; the storages stay without memory."""
    for chunk in chunks:
        if chunk.block is not None:
            arena.give(chunk.block)
            chunk.block = None


def host_bytes(chunks: Iterable[Chunk]) -> int:
    """Return the bytes of all host blocks of the chunks."""
    return sum(chunk.block.nbytes for chunk in chunks if chunk.block)
