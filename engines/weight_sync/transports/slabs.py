"""Buckets: the pieces of a plan cut to the size of a slab, and the two slabs of a sender through which they go.

A filled slot begins with a header, so that a receiver knows what it is reading: one that is stale, incomplete, damaged
or came twice is refused before it is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.weight_sync.planning.manifest import dtype_of
from rlcore.engines.weight_sync.planning.strided_copy import Copy
from rlcore.errors import DeviceError, InvalidInputError, SyncError
from rlcore.registry import get_device
from rlcore.types import IpcHandle

NUM_SLOTS = 2
ALIGNMENT = 512
"""Of a piece in a slab, in bytes; the header takes so much too."""
HEADER = 4
"""int64 values: round, bucket, bytes, checksum."""
_COLUMNS = 1024
_COLUMN_FACTOR = 5
_ROW_FACTOR = 2 * _COLUMN_FACTOR * _COLUMNS + 2  # above what the weights of two columns differ by; even


class Piece(NamedTuple):
    """A copy between two tensors that are known by numbers or names."""

    source: int | str
    """Of a sender: number of the parameter, computed weights being counted after them."""
    destination: str
    dtype: str
    """In which it travels, such as "bfloat16"."""
    copy: Copy

    @property
    def nbytes(self) -> int:
        return self.copy.numel * dtype_of(self.dtype).itemsize


class Bucket(NamedTuple):
    """What goes through a slot at once."""

    pieces: list[Piece]
    offsets: list[int]
    """Of each piece in the slot, in bytes, a multiple of ``ALIGNMENT``."""
    nbytes: int
    """Of the slot, with header and gaps."""
    payload_bytes: int
    dtypes: frozenset[str]
    """In which its pieces travel."""


def _bucket(pieces: list[Piece], offsets: list[int], nbytes: int, payload_bytes: int) -> Bucket:
    return Bucket(pieces, offsets, nbytes, payload_bytes, frozenset(piece.dtype for piece in pieces))


def fill(pieces: Iterable[Piece], slot_bytes: int) -> list[Bucket]:
    """All pieces in order, in as few buckets as possible; one that is larger than a slot is cut."""
    room = slot_bytes - ALIGNMENT
    buckets: list[Bucket] = []
    current: list[Piece] = []
    offsets: list[int] = []
    used, payload = ALIGNMENT, 0
    for piece in _cut_to(pieces, room):
        nbytes = piece.nbytes
        if used + nbytes > slot_bytes:
            buckets.append(_bucket(current, offsets, used, payload))
            current, offsets, used, payload = [], [], ALIGNMENT, 0
        current.append(piece)
        offsets.append(used)
        payload += nbytes
        used += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if current:
        buckets.append(_bucket(current, offsets, used, payload))
    return buckets


def _cut_to(pieces: Iterable[Piece], room: int) -> Iterator[Piece]:
    for piece in pieces:
        if piece.copy.numel:
            for part in _parts(piece.copy, room // dtype_of(piece.dtype).itemsize):
                yield piece._replace(copy=part)


def _parts(copy: Copy, most: int) -> Iterator[Copy]:
    """The same copy in parts of at most so many elements."""
    if copy.numel <= most:
        yield copy
        return
    inner = math.prod(copy.shape[1:])
    rows = max(1, most // inner)
    for first in range(0, copy.shape[0], rows):
        part = copy._replace(
            shape=(min(rows, copy.shape[0] - first), *copy.shape[1:]),
            source_offset=copy.source_offset + first * copy.source_stride[0],
            offset=copy.offset + first * copy.stride[0],
        )
        if inner > most:  # one row alone is too large
            part = part._replace(shape=part.shape[1:], source_stride=part.source_stride[1:], stride=part.stride[1:])
        yield from _parts(part, most)


def packing(bucket: Bucket) -> list[Piece]:
    """The copies from a sender's tensors into the slot; the destination is the slot's view in the piece's dtype."""
    return [
        piece._replace(destination=piece.dtype, copy=copy._replace(offset=at, stride=dense(copy.shape)))
        for piece, copy, at in _placed(bucket)
    ]


def unpacking(bucket: Bucket) -> list[Piece]:
    """The copies out of the slot; the source is the slot's view in the piece's dtype."""
    return [
        piece._replace(source=piece.dtype, copy=copy._replace(source_offset=at, source_stride=dense(copy.shape)))
        for piece, copy, at in _placed(bucket)
    ]


def _placed(bucket: Bucket) -> Iterator[tuple[Piece, Copy, int]]:
    for piece, offset in zip(bucket.pieces, bucket.offsets, strict=True):
        yield piece, piece.copy, offset // dtype_of(piece.dtype).itemsize


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# ------------------------------------------------------------------------------------------------- slabs


class Slabs:
    """Two slots of one allocation of a sender, and two more in shared memory of the host if receivers open those."""

    def __init__(self, device: Device, slot_bytes: int, *, is_on_host: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.is_on_host = is_on_host
        self._memory = _allocated(device, slot_bytes)
        self._owner = host() if is_on_host else device
        self._shared = _allocated(self._owner, slot_bytes) if is_on_host else self._memory
        self._handle: IpcHandle | None = None

    @property
    def handle(self) -> IpcHandle:
        """By which receivers open it; the same until ``close``.

        Raises:
            DeviceError, UnsupportedError: the memory cannot be shared; says why.
        """
        if self._handle is None:
            self._handle = self._owner.memory.export_ipc(self._shared)
        return self._handle

    def slot(self, number: int) -> Tensor:
        """To be filled, on the device."""
        return slot_of(self._memory, number)

    def show(self, number: int, nbytes: int) -> None:
        """Let receivers see what the slot holds, once the device has done it."""
        if self.is_on_host:
            slot_of(self._shared, number)[:nbytes].copy_(self.slot(number)[:nbytes])

    def close(self, timeout_s: float) -> None:
        """Raises StateError when a receiver does not let go."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._owner.memory.revoke(handle, timeout_s=timeout_s)


def host() -> Any:
    """The device whose memory every process of a machine can open."""
    return get_device("cpu")


def _allocated(device: Device, slot_bytes: int) -> Tensor:
    try:
        return torch.empty(NUM_SLOTS * slot_bytes, dtype=torch.uint8, device=device.torch_device)
    except RuntimeError as error:
        raise DeviceError(
            f"{device.name} has no memory for {NUM_SLOTS} slabs of {slot_bytes} bytes; give a smaller slab_bytes"
        ) from error


def slot_of(memory: Tensor, number: int) -> Tensor:
    """[slot_bytes] uint8."""
    return memory.view(NUM_SLOTS, -1)[number]


def views(slot: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """The slot in each dtype of its pieces."""
    return {dtype: slot.view(dtype_of(dtype)) for dtype in bucket.dtypes}


def check_slot_bytes(slot_bytes: int) -> None:
    if type(slot_bytes) is not int or slot_bytes < 2 * ALIGNMENT or slot_bytes % ALIGNMENT:
        raise InvalidInputError(
            f"a slab must be a multiple of {ALIGNMENT} bytes and at least {2 * ALIGNMENT}, got {slot_bytes!r}"
        )


def stamp(slot: Tensor, round_id: int, number: int, bucket: Bucket, *, is_checked: bool) -> None:
    """Write the header, on the device, behind the copies that fill the slot."""
    header = torch.tensor([round_id, number, bucket.nbytes, 0], dtype=torch.int64).to(slot.device)
    if is_checked:
        header[-1] = checksum(slot[ALIGNMENT : bucket.nbytes])
    slot.view(torch.int64)[:HEADER] = header


def check(slot: Tensor, round_id: int, number: int, bucket: Bucket, *, is_checked: bool) -> None:
    """Raises SyncError unless the slot holds this bucket of this round, whole."""
    head = slot.view(torch.int64)[:HEADER]
    found_round, found_number, found_bytes, found_sum = head.tolist()
    if (found_round, found_number, found_bytes) != (round_id, number, bucket.nbytes):
        raise SyncError(
            f"bucket {number} of round {round_id} was expected in a slab, with {bucket.nbytes} bytes, and it holds "
            f"bucket {found_number} of round {found_round}, with {found_bytes}"
        )
    if is_checked and int(checksum(slot[ALIGNMENT : bucket.nbytes])) != found_sum:
        raise SyncError(f"bucket {number} of round {round_id} is damaged: its {bucket.nbytes} bytes have another sum")


def checksum(data: Tensor) -> Tensor:
    """A number that changes with every single change.

    Exchanged parts change it too, unless the sums of their words are equal or differ in high bits alone.

    Args:
        data: [n] uint8, n a multiple of 8, aligned to 8 bytes.

    Returns:
        int64 scalar on the device of ``data``.
    """
    words = data.view(torch.int64)
    # Each word is multiplied by an odd number of its own: the difference of one cannot vanish modulo 2^64.
    rows = words.numel() // _COLUMNS
    grid, last = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    by_column, by_row = grid.sum(0), torch.cat([grid.sum(1), last.sum(0, keepdim=True)])
    by_column[: last.numel()] += last
    return _weighted(by_column) * _COLUMN_FACTOR + _weighted(by_row) * _ROW_FACTOR


def _weighted(values: Tensor) -> Tensor:
    weights = torch.arange(values.numel(), device=values.device) * 2 + 1
    return (values * weights).sum()
