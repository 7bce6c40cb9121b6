"""Thousands of strided copies at once, with a change of dtype where the two sides differ.

    for each piece, for each index i of its shape:
        destinations[d][offset + i @ stride] = sources[s][source_offset + i @ source_stride]

The copies are prepared once for a list of pieces and run many times; where tensors have moved, only their addresses are
read again. A source may be memory of another device or process, if the destinations' device can read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.dispatch import Query, choose


class StridedPiece(NamedTuple):
    """One copy; offsets and strides are in elements from the first of each tensor."""

    source: int
    """Index of the tensor in ``sources``."""
    destination: int
    shape: tuple[int, ...]
    source_offset: int
    source_stride: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


class PreparedCopies(ABC):
    """The pieces between certain tensors, prepared by an implementation of ``strided_copy``."""

    @abstractmethod
    def __init__(
        self, pieces: Sequence[StridedPiece], sources: Sequence[Tensor], destinations: Sequence[Tensor]
    ) -> None: ...

    @abstractmethod
    def rebind(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        """Use these tensors from now on; they differ from the first in their addresses alone."""

    @abstractmethod
    def run(self) -> None:
        """Queue all copies on the current stream of the destinations' device."""


class StridedCopies:
    """A list of copies that do not write over each other, nor into what another reads."""

    def __init__(
        self,
        pieces: Sequence[StridedPiece],
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        *,
        implementation: str | None = None,
    ) -> None:
        """
        Args:
            destinations: on one device.
            implementation: forces one; ``rlcore ops explain strided_copy`` lists them.

        Raises:
            InvalidInputError: a piece reaches beyond a tensor's memory, or destinations are on several devices.
        """
        device = _common_device(destinations)
        self._bounds = [
            _AccessBounds.of(
                [(piece.source, piece.source_offset, piece.source_stride, piece.shape) for piece in pieces]
            ),
            _AccessBounds.of([(piece.destination, piece.offset, piece.stride, piece.shape) for piece in pieces]),
        ]
        self._check(sources, destinations)
        choice = choose("strided_copy", Query(device.type, torch.uint8, 0, 0), implementation)
        self.implementation = choice.implementation
        self._prepared: PreparedCopies = choice.fn(pieces, sources, destinations)

    def bind(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        """Use these tensors from now on. Their addresses may differ; dtypes and devices are those of the first.

        Raises:
            InvalidInputError: as above.
        """
        self._check(sources, destinations)
        self._prepared.rebind(sources, destinations)

    @torch.no_grad()
    def run(self) -> None:
        """Queue all copies on the current stream of the destinations' device."""
        self._prepared.run()

    def _check(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        for what, bounds, tensors in zip(("source", "destination"), self._bounds, (sources, destinations), strict=True):
            num_elements = np.array([_num_elements(tensor) for tensor in tensors], dtype=np.int64)[bounds.tensor]
            is_beyond = (bounds.first < 0) | (bounds.last >= num_elements)
            if is_beyond.any():
                piece = int(is_beyond.argmax())
                raise InvalidInputError(
                    f"a strided copy reaches element {bounds.last[piece]} of {what} {bounds.tensor[piece]}, "
                    f"whose memory holds {num_elements[piece]}. Was it moved, freed, or made for another layout?"
                )


class _AccessBounds(NamedTuple):
    """The first and last element that each piece accesses at one of its ends, as columns; empty pieces are left out."""

    tensor: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, ends: Iterable[tuple[int, int, tuple[int, ...], tuple[int, ...]]]) -> _AccessBounds:
        rows = [
            (tensor, offset, offset + sum(step * (size - 1) for step, size in zip(stride, shape, strict=True)))
            for tensor, offset, stride, shape in ends
            if 0 not in shape
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return cls(*columns)


def _num_elements(tensor: Tensor) -> int:
    """Return the elements of the storage from the tensor's first on."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset())


def _common_device(destinations: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in destinations} or {torch.device("cpu")}
    if len(devices) > 1:
        raise InvalidInputError(f"strided copies write to one device, got {sorted(map(str, devices))}")
    return devices.pop()


class ViewCopies(PreparedCopies):
    """``strided_copy`` as a ``copy_`` of views for each piece, on any device."""

    def __init__(
        self, pieces: Sequence[StridedPiece], sources: Sequence[Tensor], destinations: Sequence[Tensor]
    ) -> None:
        self._pieces = pieces
        self.rebind(sources, destinations)

    def rebind(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        self._views = [
            (
                _view(destinations[piece.destination], piece.shape, piece.stride, piece.offset),
                _view(sources[piece.source], piece.shape, piece.source_stride, piece.source_offset),
            )
            for piece in self._pieces
        ]

    def run(self) -> None:
        for destination, source in self._views:
            destination.copy_(source, non_blocking=True)


def _view(tensor: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return tensor.detach().as_strided(shape, stride, int(tensor.storage_offset()) + offset)
