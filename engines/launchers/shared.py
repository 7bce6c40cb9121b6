"""Tensors between a parent and its child, through shared memory without a name.

The sender copies tensors into a memfd segment, whose descriptor travels once over their socket; the receiver's
tensors are views of the same pages. When the last of them dies the receiver says so with its next message, and the
sender uses the segment again. Nothing has a name, so nothing is left behind however either side ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.tensor_data import dtype_name

_ALIGNMENT = 64
_PAGE = 2 << 20  # segments are sized in huge pages, so that one fits the next message of about the same size
_KEPT_FREE = 2  # free segments kept warm: one to fill while the other is read
_KEPT_MESSAGES = 32  # for which a free segment is kept unused


class TensorRef(msgspec.Struct, array_like=True):
    """Where one tensor of a message lies in its segment."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Parcel(msgspec.Struct, array_like=True):
    """The shared-memory part of one message."""

    segment: int
    nbytes: int
    tensors: list[TensorRef]
    is_new: bool
    """The segment's descriptor comes with this message."""


class Housekeeping(msgspec.Struct, array_like=True):
    """Rides on every message."""

    released: list[int]
    """Segments of the peer that nothing here looks at any more."""
    dropped: list[int]
    """Own segments that were given up; the peer unmaps them."""


@dataclass(slots=True)
class _Segment:
    descriptor: int
    mapping: mmap.mmap
    nbytes: int
    last_use: int = 0
    """Number of the message that it went with."""


@dataclass(slots=True)
class Outbox:
    """The sending side's segments."""

    _lock: threading.Lock = field(default_factory=threading.Lock)  # one thread packs, another hears of releases
    _segments: dict[int, _Segment] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    _next: int = 0
    _num_messages: int = 0

    def pack(self, tensors: Sequence[Tensor]) -> tuple[Parcel | None, list[int]]:
        """Copy tensors into a segment; the parcel, and the descriptors to send along."""
        with self._lock:
            self._num_messages += 1
            self._drop([n for n in self._free if self._num_messages - self._segments[n].last_use > _KEPT_MESSAGES])
        if not tensors:
            return None, []
        refs, total = [], 0
        for tensor in tensors:
            refs.append(TensorRef(dtype_name(tensor.dtype), tuple(tensor.shape), total))
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            number, is_new = self._take(total)
        whole = torch.frombuffer(self._segments[number].mapping, dtype=torch.uint8)
        for tensor, ref in zip(tensors, refs, strict=True):
            _typed(whole, ref).copy_(tensor)
        descriptors = [self._segments[number].descriptor] if is_new else []
        return Parcel(number, total, refs, is_new), descriptors

    def released(self, numbers: Sequence[int]) -> None:
        """The peer is done with these segments."""
        with self._lock:
            self._free.extend(numbers)
            by_size = sorted(self._free, key=lambda free: self._segments[free].nbytes)
            self._drop(by_size[:-_KEPT_FREE])

    def dropped(self) -> list[int]:
        """Segments given up since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def close(self) -> None:
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()
        self._free.clear()

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._free.remove(number)
            os.close(self._segments.pop(number).descriptor)
            self._dropped.append(number)

    def _take(self, nbytes: int) -> tuple[int, bool]:
        fitting = [number for number in self._free if self._segments[number].nbytes >= nbytes]
        if fitting:
            number = min(fitting, key=lambda free: self._segments[free].nbytes)
            self._free.remove(number)
            self._segments[number].last_use = self._num_messages
            return number, False
        size = max(1, -(-nbytes // _PAGE)) * _PAGE
        descriptor = os.memfd_create("rlcore", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        self._next += 1
        self._segments[self._next] = _Segment(descriptor, _map(descriptor, size), size, self._num_messages)
        return self._next, True


@dataclass(slots=True)
class Inbox:
    """The receiving side's mappings of the peer's segments."""

    _mappings: dict[int, mmap.mmap] = field(default_factory=dict)
    _released: deque[int] = field(default_factory=deque)

    def unpack(self, parcel: Parcel | None, descriptors: list[int]) -> list[Tensor]:
        """The tensors of a parcel, as views of the shared pages."""
        if parcel is None:
            return []
        if parcel.is_new:
            (descriptor,) = descriptors
            self._mappings[parcel.segment] = _map(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        # A ctypes array over the mapping is the owner that every view of the message keeps alive.
        owner: Any = (ctypes.c_ubyte * max(parcel.nbytes, 1)).from_buffer(self._mappings[parcel.segment])
        # Runs wherever the last view dies: appending to a deque needs no lock.
        weakref.finalize(owner, self._released.append, parcel.segment).atexit = False
        whole = torch.frombuffer(owner, dtype=torch.uint8)
        return [_typed(whole, ref) for ref in parcel.tensors]

    def released(self) -> list[int]:
        """Segments that nothing looks at any more since the last call."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def dropped(self, numbers: Sequence[int]) -> None:
        """The peer gave these segments up."""
        for number in numbers:
            del self._mappings[number]  # unmapped when the last exported buffer is gone

    def close(self) -> None:
        self._mappings.clear()


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _typed(whole: Tensor, ref: TensorRef) -> Tensor:
    dtype: torch.dtype = getattr(torch, ref.dtype)
    numel = torch.Size(ref.shape).numel()
    return whole[ref.offset : ref.offset + numel * dtype.itemsize].view(dtype).view(ref.shape)
