"""Runs pieces between tensors that are known by their numbers and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlcore.engines.sync.slabs import Piece
from rlcore.kernels.strided_copy import Copies, StridedPiece


class Mover:
    """The copies of one list of pieces, made ready by the first run, and again only where a tensor has moved."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        sources: dict[Any, int] = {}
        destinations: dict[str, int] = {}
        self._pieces = [
            StridedPiece(
                sources.setdefault(piece.source, len(sources)),
                destinations.setdefault(piece.destination, len(destinations)),
                *piece.copy,
            )
            for piece in pieces
        ]
        self._sources, self._destinations = list(sources), list(destinations)
        self._copies: Copies | None = None
        self._addresses: list[int] = []

    def run(self, sources: Mapping[Any, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Queue all copies on the current stream."""
        if not self._pieces:
            return
        from_, to = [sources[key] for key in self._sources], [destinations[key] for key in self._destinations]
        addresses = [tensor.data_ptr() for tensor in (*from_, *to)]
        if self._copies is None:
            self._copies = Copies(self._pieces, from_, to)
        elif addresses != self._addresses:
            self._copies.bind(from_, to)
        self._addresses = addresses
        self._copies.run()
