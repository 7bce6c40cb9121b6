"""Runs pieces between tensors that are known by their numbers and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.sync.slabs import Piece


class Mover:
    """The copies of one list of pieces, made for the first run and used again while the tensors stay where they are."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    @torch.no_grad()
    def run(self, sources: Mapping[Any, Tensor], destinations: Mapping[Any, Tensor]) -> None:
        for piece in self._pieces:
            copy = piece.copy
            source, destination = sources[piece.source], destinations[piece.destination]
            _region(destination, copy.shape, copy.stride, copy.offset).copy_(
                _region(source, copy.shape, copy.source_stride, copy.source_offset)
            )


def _region(tensor: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)
