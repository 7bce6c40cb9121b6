"""Thousands of strided copies at once, with a change of dtype where the two sides differ.

    for each piece, for each index i of its shape:
        destinations[d][offset + i @ stride] = sources[s][source_offset + i @ source_stride]

Made once for a list of pieces and run many times; where tensors have moved, only their addresses are looked at again.
A source may be another device's memory, or another process's, wherever the destinations' device can read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

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


class Bound(ABC):
    """Pieces between certain tensors, made ready by an implementation of ``strided_copy``."""

    @abstractmethod
    def __init__(
        self, pieces: Sequence[StridedPiece], sources: Sequence[Tensor], destinations: Sequence[Tensor]
    ) -> None: ...

    @abstractmethod
    def rebind(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        """Use these tensors from now on, which are as the first but lie elsewhere."""

    @abstractmethod
    def run(self) -> None:
        """Queue all copies on the current stream of the destinations' device."""


class Copies:
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
        self._pieces = pieces
        device = _common_device(destinations)
        self._check(sources, destinations)
        choice = choose("strided_copy", Query(device.type, torch.uint8, 0, 0), implementation)
        self.implementation = choice.implementation
        self._bound: Bound = choice.fn(pieces, sources, destinations)

    def bind(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        """Use these tensors from now on, which may lie elsewhere; dtypes are those of the first.

        Raises:
            InvalidInputError: as above.
        """
        self._check(sources, destinations)
        self._bound.rebind(sources, destinations)

    @torch.no_grad()
    def run(self) -> None:
        """Queue all copies on the current stream of the destinations' device."""
        self._bound.run()

    def _check(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        rooms = [[_room(tensor) for tensor in tensors] for tensors in (sources, destinations)]
        for piece in self._pieces:
            ends = (
                (rooms[0][piece.source], piece.source_offset, piece.source_stride, "source", piece.source),
                (rooms[1][piece.destination], piece.offset, piece.stride, "destination", piece.destination),
            )
            for room, offset, strides, what, index in ends:
                last = offset + sum(s * (n - 1) for n, s in zip(piece.shape, strides, strict=True))
                if 0 not in piece.shape and not 0 <= offset <= last < room:
                    raise InvalidInputError(
                        f"a strided copy of {list(piece.shape)} reaches element {last} of {what} {index}, whose memory "
                        f"holds {room}. Was it moved, freed, or made for another layout?"
                    )


def _room(tensor: Tensor) -> int:
    """Elements of its storage from its first."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset())


def _common_device(destinations: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in destinations} or {torch.device("cpu")}
    if len(devices) > 1:
        raise InvalidInputError(f"strided copies write to one device, got {sorted(map(str, devices))}")
    return devices.pop()


class ViewCopies(Bound):
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
