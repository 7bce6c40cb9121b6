"""Tensors between a process and its child, through shared memory without a name.

The sender copies tensors into a memfd segment, whose descriptor travels once over their socket. The receiver's tensors
are views of the same pages. When the last view dies the receiver says so with its next message, and the sender uses the
segment again. A segment has no name, so nothing is left behind however either process ends.
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


class SharedTensor(msgspec.Struct, array_like=True):
    """The place of one tensor in its segment."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class SharedTensors(msgspec.Struct, array_like=True):
    """The tensors of one message."""

    segment: int
    nbytes: int
    tensors: list[SharedTensor]
    is_new: bool
    """The segment's descriptor comes with this message."""


class SegmentNotice(msgspec.Struct, array_like=True):
    """News about segments, which every message carries."""

    unused: list[int]
    """Segments of the peer without any view here."""
    freed: list[int]
    """Own segments that are closed; the peer unmaps them."""


@dataclass(slots=True)
class _Segment:
    descriptor: int
    mapping: mmap.mmap
    nbytes: int
    last_use: int = 0
    """The number of the message that it went with."""


@dataclass(slots=True)
class SharedTensorSender:
    """The segments of the sending side."""

    _lock: threading.Lock = field(default_factory=threading.Lock)  # one thread packs, another hears of unused segments
    _segments: dict[int, _Segment] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _freed: list[int] = field(default_factory=list)
    _next: int = 0
    _num_messages: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(segment.nbytes for segment in list(self._segments.values()))

    def pack(self, tensors: Sequence[Tensor]) -> tuple[SharedTensors | None, list[int]]:
        """Copy tensors into a segment; return their places, and the descriptors to send along."""
        with self._lock:
            self._num_messages += 1
            self._close([n for n in self._free if self._num_messages - self._segments[n].last_use > _KEPT_MESSAGES])
        if not tensors:
            return None, []
        places, total = [], 0
        for tensor in tensors:
            places.append(SharedTensor(dtype_name(tensor.dtype), tuple(tensor.shape), total))
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            number, is_new = self._take(total)
        whole = torch.frombuffer(self._segments[number].mapping, dtype=torch.uint8)
        for tensor, place in zip(tensors, places, strict=True):
            _typed(whole, place).copy_(tensor)
        descriptors = [self._segments[number].descriptor] if is_new else []
        return SharedTensors(number, total, places, is_new), descriptors

    def reuse(self, numbers: Sequence[int]) -> None:
        """Use these segments again: the peer has no view of them."""
        with self._lock:
            self._free.extend(numbers)
            by_size = sorted(self._free, key=lambda free: self._segments[free].nbytes)
            self._close(by_size[:-_KEPT_FREE])

    def freed(self) -> list[int]:
        """Return the segments closed since the last call."""
        with self._lock:
            freed, self._freed = self._freed, []
        return freed

    def close(self) -> None:
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()
        self._free.clear()

    def _close(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._free.remove(number)
            os.close(self._segments.pop(number).descriptor)
            self._freed.append(number)

    def _take(self, nbytes: int) -> tuple[int, bool]:
        """Return a segment of at least so many bytes, and True if it is new."""
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
class SharedTensorReceiver:
    """The receiving side's mappings of the peer's segments."""

    _mappings: dict[int, mmap.mmap] = field(default_factory=dict)
    _unused: deque[int] = field(default_factory=deque)

    @property
    def num_bytes(self) -> int:
        return sum(len(mapping) for mapping in list(self._mappings.values()))

    def unpack(self, shared: SharedTensors | None, descriptors: list[int]) -> list[Tensor]:
        """Return the tensors of a message, as views of the shared pages. The caller closes the descriptors."""
        if shared is None:
            return []
        if shared.is_new:
            (descriptor,) = descriptors
            self._mappings[shared.segment] = _map(descriptor, os.fstat(descriptor).st_size)
        # A ctypes array over the mapping is the owner that every view of the message keeps alive.
        owner: Any = (ctypes.c_ubyte * max(shared.nbytes, 1)).from_buffer(self._mappings[shared.segment])
        # Runs wherever the last view dies: appending to a deque needs no lock.
        weakref.finalize(owner, self._unused.append, shared.segment).atexit = False
        whole = torch.frombuffer(owner, dtype=torch.uint8)
        return [_typed(whole, place) for place in shared.tensors]

    def unused(self) -> list[int]:
        """Return the segments that have lost their last view since the last call."""
        return [self._unused.popleft() for _ in range(len(self._unused))]

    def unmap(self, numbers: Sequence[int]) -> None:
        """Forget segments that the peer has closed."""
        for number in numbers:
            del self._mappings[number]  # unmapped when the last exported buffer is gone

    def close(self) -> None:
        self._mappings.clear()


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _typed(whole: Tensor, place: SharedTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    numel = torch.Size(place.shape).numel()
    return whole[place.offset : place.offset + numel * dtype.itemsize].view(dtype).view(place.shape)
