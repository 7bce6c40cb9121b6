"""Thousands of strided copies at once, with a change of dtype where the two sides differ.

    for each piece, for each index i of its shape:
        destinations[d][offset + i @ stride] = sources[s][source_offset + i @ source_stride]

Made once for a list of pieces and run many times; where tensors moved, only their addresses are looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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


class Copies:
    """A list of copies that do not write over each other."""

    def __init__(
        self, pieces: Sequence[StridedPiece], sources: Sequence[Tensor], destinations: Sequence[Tensor]
    ) -> None:
        self._pieces = pieces
        self.bind(sources, destinations)

    def bind(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        """Use these tensors from now on, which may lie elsewhere; shapes and dtypes are those of the first."""
        self._views = [
            (
                destinations[piece.destination].as_strided(
                    piece.shape, piece.stride, destinations[piece.destination].storage_offset() + piece.offset
                ),
                sources[piece.source].as_strided(
                    piece.shape, piece.source_stride, sources[piece.source].storage_offset() + piece.source_offset
                ),
            )
            for piece in self._pieces
        ]

    @torch.no_grad()
    def run(self) -> None:
        """Queue all copies on the current stream of the destinations' device."""
        for destination, source in self._views:
            destination.copy_(source, non_blocking=True)
