"""What of one set of storages is away from its device, and how it leaves and comes back, a block at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlcore.engines.offload.host_arena import Arena, Block, aligned
from rlcore.engines.offload.storages import bytes_of

_ROUNDED_TO = 512
"""Bytes of an allocation by torch."""
_LARGEST_SMALL = 1 << 20
"""Bytes of an allocation that torch takes from segments of their own, of 2 MiB, and never from a larger piece."""
_MOST_PIECES = 16
_SMALLEST_PIECE = 1 << 30


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a storage."""

    storage: torch.UntypedStorage
    storage_bytes: int
    """Of the whole, while it is on its device."""
    start: int
    nbytes: int


def whole(storages: Iterable[torch.UntypedStorage]) -> list[Range]:
    return [Range(storage, storage.nbytes(), 0, storage.nbytes()) for storage in storages]


@dataclass(eq=False, slots=True)
class Parcel:
    """Ranges that lie in one block, one behind the other; without a block their values are gone."""

    block: Block | None
    ranges: list[Range]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.ranges) if self.block else 0

    def pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Bytes in host memory, and the same on the device."""
        if self.block is None:
            return [], []
        ends = itertools.accumulate((aligned(part.nbytes) for part in self.ranges), initial=0)
        memory, first = self.block.tensor, self.block.tensor.storage_offset()
        return (
            [memory.as_strided((part.nbytes,), (1,), first + at) for part, at in zip(self.ranges, ends, strict=False)],
            [bytes_of(part.storage, part.start, part.nbytes) for part in self.ranges],
        )


@dataclass(eq=False, slots=True)
class Cargo:
    """Of one set, what is away."""

    parcels: deque[Parcel] = field(default_factory=deque)

    @property
    def host_bytes(self) -> int:
        return sum(parcel.block.nbytes for parcel in self.parcels if parcel.block)

    @property
    def is_pinned(self) -> bool:
        return all(parcel.block.slab.is_pinned for parcel in self.parcels if parcel.block)

    def release(self, arena: Arena) -> None:
        """The values go, the storages stay away."""
        for parcel in self.parcels:
            if parcel.block is not None:
                arena.give(parcel.block)
                parcel.block = None


class Departure:
    """One set, or what is there of it, on its way to the host."""

    def __init__(self, cargo: Cargo, ranges: Iterable[Range], *, frees: bool = True) -> None:
        """Without ``frees`` it is a copy that leaves."""
        self.cargo = cargo
        self._frees = frees
        self._rest = deque(ranges)
        self._unsent: Counter[int] = Counter()  # storage -> bytes that must leave before it is freed
        for part in self._rest:
            self._unsent[part.storage._cdata] += part.nbytes
        self.rest_bytes = sum(aligned(part.nbytes) for part in self._rest)
        """Of host memory, for what has not been packed."""
        self.largest_bytes = max((part.storage_bytes for part in self._rest), default=0)
        self.moved_bytes = self.freed_bytes = 0
        self.is_pinned = True

    @property
    def is_over(self) -> bool:
        return not self._unsent

    def pack(self, block: Block) -> Parcel:
        """The next bytes, as many as the block holds."""
        parcel = Parcel(block, [])
        room = block.nbytes
        while self._rest and room:
            part = self._rest.popleft()
            if part.nbytes > room:
                rest = Range(part.storage, part.storage_bytes, part.start + room, part.nbytes - room)
                self._rest.appendleft(rest)
                part = Range(part.storage, part.storage_bytes, part.start, room)
            parcel.ranges.append(part)
            room -= aligned(part.nbytes)
            self.rest_bytes -= aligned(part.nbytes)
        return parcel

    def has_left(self, parcel: Parcel) -> None:
        """Its bytes are in host memory: free the storages that are there whole."""
        self.cargo.parcels.append(parcel)
        self.moved_bytes += parcel.nbytes
        self.is_pinned &= parcel.block is not None and parcel.block.slab.is_pinned
        for part in parcel.ranges:
            self._unsent[part.storage._cdata] -= part.nbytes
            if not self._unsent[part.storage._cdata]:
                del self._unsent[part.storage._cdata]
                if self._frees:
                    part.storage.resize_(0)
                    self.freed_bytes += part.storage_bytes


class Arrival:
    """What is away of one set on its way back.

    With ``gathers`` torch's allocator is made to take memory from the device in few pieces, in which the storages then
    lie, but for small ones: other processes open pieces, so that these tensors are shared with them quickly. They are
    not one piece, which nobody else could have any of before all that lies in it has left again. Free memory that the
    allocator has kept would be taken instead: it must be given back before. A storage of over half of what torch calls
    small grows beyond that, as one or two of them would fill a segment: k and v projections often have 1 MiB.
    """

    def __init__(self, cargo: Cargo, *, gathers: bool = False) -> None:
        self.cargo = cargo
        self._rest = deque(cargo.parcels)
        self._taken: list[Range] = []
        self._arrived: list[Range] = []
        self._valueless: list[Parcel] = []
        self.host_bytes = cargo.host_bytes
        self.largest_bytes = max((part.storage_bytes for parcel in self._rest for part in parcel.ranges), default=0)
        self.moved_bytes = self.taken_bytes = 0
        self.is_pinned = cargo.is_pinned
        self._is_gathered = gathers
        self._ungathered = deque(_large_allocations(self._rest) if gathers else ())
        self._piece_bytes = max(_SMALLEST_PIECE, sum(self._ungathered) // _MOST_PIECES)
        self._gathered_bytes = 0

    @property
    def is_over(self) -> bool:
        return not self.cargo.parcels

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    @property
    def gathers(self) -> bool:
        """More pieces will be taken."""
        return bool(self._ungathered)

    @property
    def needed_bytes(self) -> int:
        """Of device memory, for the next parcel."""
        return sum(part.storage_bytes for part in self._absent())

    def unpack(self) -> Parcel:
        """The next parcel, its storages there. Raises what torch raises when there is no memory; nothing is taken."""
        absent = self._absent()
        if self.gathers:
            self._gather(sum(_large_allocations(itertools.islice(self._rest, 1))))
        try:
            for part in absent:
                part.storage.resize_(_gathered_size(part) if self._is_gathered else part.storage_bytes)
        except BaseException:
            for part in absent:
                part.storage.resize_(0)
            raise
        self._taken += absent
        self.taken_bytes += sum(part.storage_bytes for part in absent)
        return self._rest.popleft()

    def _gather(self, nbytes: int) -> None:
        """See that so much is left of a piece, unless the device has none of that size."""
        device = self._rest[0].ranges[0].storage.device
        while self._ungathered and self._gathered_bytes < nbytes:
            piece = 0
            while self._ungathered and piece < self._piece_bytes:
                piece += self._ungathered.popleft()
            with contextlib.suppress(RuntimeError):  # such as torch.OutOfMemoryError
                torch.empty(piece, dtype=torch.uint8, device=device)
            self._gathered_bytes += piece
        self._gathered_bytes -= nbytes

    def has_arrived(self, parcel: Parcel, arena: Arena) -> None:
        """Its bytes are on the device: the block is free."""
        if parcel.block is None:
            self._valueless.append(parcel)
        else:
            self._arrived += parcel.ranges
            self.moved_bytes += parcel.nbytes
            arena.give(parcel.block)
        self.cargo.parcels.remove(parcel)

    def reversed(self) -> Departure:
        """What has arrived leaves again; a storage of which nothing has is freed at once."""
        arrived = {part.storage._cdata for part in self._arrived}
        for part in self._taken:
            if part.storage._cdata not in arrived:
                part.storage.resize_(0)
        self.cargo.parcels += self._valueless
        return Departure(self.cargo, self._arrived)

    def _absent(self) -> list[Range]:
        """Of the next parcel; a storage has one range in it."""
        return [part for part in self._rest[0].ranges if not part.storage.nbytes()]


def _large_allocations(parcels: Iterable[Parcel]) -> list[int]:
    """Bytes that torch's allocator takes of a piece for each absent storage."""
    absent = {
        part.storage._cdata: -(-_gathered_size(part) // _ROUNDED_TO) * _ROUNDED_TO
        for parcel in parcels
        for part in parcel.ranges
        if _is_torchs(part) and not part.storage.nbytes()
    }
    return [nbytes for nbytes in absent.values() if nbytes > _LARGEST_SMALL]


def _gathered_size(part: Range) -> int:
    """Bytes to give its storage."""
    grows = _is_torchs(part) and _LARGEST_SMALL // 2 < part.storage_bytes <= _LARGEST_SMALL
    return _LARGEST_SMALL + _ROUNDED_TO if grows else part.storage_bytes


def _is_torchs(part: Range) -> bool:
    """Other memory has an owner of its own."""
    return isinstance(part.storage, torch.UntypedStorage)
