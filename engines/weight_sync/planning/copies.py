"""Runs pieces between tensors that are known by their numbers and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlcore.engines.weight_sync.transports.slabs import Piece
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece


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
        self._from, self._to = _Side(list(sources)), _Side(list(destinations))
        self._copies: StridedCopies | None = None

    def run(self, sources: Mapping[Any, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Queue all copies on the current stream.

        Args:
            sources: the same mapping as in the last run says that none has moved; so do ``destinations``.
        """
        if not self._pieces:
            return
        have_moved = [self._from.find(sources), self._to.find(destinations)]
        copies, self._copies = self._copies, None  # they are kept only if they could be made ready
        if copies is None:
            copies = StridedCopies(self._pieces, self._from.tensors, self._to.tensors)
        elif any(have_moved):
            copies.bind(self._from.tensors, self._to.tensors)
        self._copies = copies
        copies.run()


class _Side:
    """The tensors at one end of all pieces."""

    def __init__(self, keys: list[Any]) -> None:
        self._keys = keys
        self._given: Mapping[Any, Tensor] | None = None
        self._addresses: list[int] = []
        self.tensors: list[Tensor] = []

    def find(self, given: Mapping[Any, Tensor]) -> bool:
        """Whether one has moved since it was found last."""
        if given is self._given:
            return False
        self._given = given
        self.tensors = [given[key] for key in self._keys]
        before, self._addresses = self._addresses, [tensor.data_ptr() for tensor in self.tensors]
        return before != self._addresses
