"""A batch of copies: pairs of equal shape and dtype that may run in any order, and at the same time.

A batch has thousands of pairs, and a slow Python loop over them would take longer than the copies. So each property is
read from all tensors in one pass, and the properties are compared as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from rlcore.errors import InvalidInputError

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
_PLAIN = {torch.Tensor, torch.nn.Parameter}

Flags = np.ndarray[Any, np.dtype[np.bool_]]

_LOW_ADDRESS = 1 << 40
"""The data pointer of a freed tensor is only its offset. Tensors below this address are checked one by one."""


class BatchSide:
    """The destinations of a batch, or its sources."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.devices = list(map(attrgetter("device"), self.tensors))
        self.start: Numbers = self._numbers(torch.Tensor.data_ptr)
        self.nbytes: Numbers = self._numbers(attrgetter("nbytes"))
        self.is_dense: Flags = np.array(list(map(torch.Tensor.is_contiguous, self.tensors)), dtype=bool)
        self.is_dense &= self.nbytes > 0

    def is_on(self, device: torch.device) -> Flags:
        return np.array([found == device for found in self.devices], dtype=bool)

    def dense_ranges(self, device: torch.device) -> tuple[Numbers, Numbers]:
        """Return first bytes and ends of the contiguous tensors on ``device``, in rising order."""
        chosen = self.is_dense & self.is_on(device)
        start, nbytes = self.start[chosen], self.nbytes[chosen]
        order = start.argsort()
        return start[order], start[order] + nbytes[order]

    def _numbers(self, get: Any) -> Numbers:
        return np.fromiter(map(get, self.tensors), dtype=np.uint64, count=len(self.tensors))


class Batch:
    """Checked copies.

    Raises:
        InvalidInputError: pairs differ, are elsewhere, were freed, or their memory overlaps.
    """

    def __init__(self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], device: torch.device) -> None:
        _check_pairs(dst, src)
        self.dst, self.src = BatchSide(dst), BatchSide(src)
        _check_devices({*self.dst.devices, *self.src.devices}, device)
        _check_memory(self.dst, "destination")
        _check_memory(self.src, "source")
        for where in set(self.dst.devices):
            _check_overlap(self.dst, self.src, where)


def _check_pairs(dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor]) -> None:
    for tensors in (dst, src):
        if not isinstance(tensors, Sequence):
            raise InvalidInputError(f"copy_batch takes two sequences of tensors, got {type(tensors).__name__}")
        if other := {type(tensor) for tensor in tensors} - _PLAIN:
            raise InvalidInputError(
                f"copy_batch takes plain tensors, got {', '.join(sorted(kind.__name__ for kind in other))}; of a "
                "DTensor give to_local()"
            )
    if len(dst) != len(src):
        raise InvalidInputError(f"copy_batch takes a source for each destination, got {len(dst)} and {len(src)}")
    for what in (attrgetter("shape"), attrgetter("dtype")):
        wanted, given = list(map(what, dst)), list(map(what, src))
        if wanted != given:
            position = [to == from_ for to, from_ in zip(wanted, given, strict=True)].index(False)
            raise InvalidInputError(
                f"copy_batch takes pairs of equal shape and dtype, got {_words(dst[position])} from "
                f"{_words(src[position])} as pair {position}"
            )


def _words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_devices(found: set[torch.device], device: torch.device) -> None:
    others = sorted(str(other) for other in found if other.type not in (device.type, "cpu"))
    if others:
        raise InvalidInputError(f"copy_batch of {device} takes tensors there and in host memory, got {others}")


def _check_memory(side: BatchSide, what: str) -> None:
    """Refuse tensors of freed storages: a copy of one would end the process."""
    for position in np.flatnonzero((side.start < _LOW_ADDRESS) & (side.nbytes > 0)):
        tensor = side.tensors[position]
        if not tensor.untyped_storage().data_ptr():
            raise InvalidInputError(
                f"copy_batch takes tensors that hold memory; that of the {what} of pair {position}, "
                f"{_words(tensor)} on {tensor.device}, was freed: bring it back first, as onload() does"
            )


def _check_overlap(dst: BatchSide, src: BatchSide, device: torch.device) -> None:
    """Check contiguous tensors for overlaps; strided ones may interleave."""
    start, end = dst.dense_ranges(device)
    if (start[1:] < end[:-1]).any():
        raise InvalidInputError(f"copy_batch takes destinations that do not overlap; two on {device} do")
    source_start, source_end = src.dense_ranges(device)
    first_behind = end.searchsorted(source_start, side="right")
    is_before_one = first_behind < len(start)
    if (start[first_behind[is_before_one]] < source_end[is_before_one]).any():
        raise InvalidInputError(f"copy_batch takes sources that no destination overlaps; on {device} one does")
