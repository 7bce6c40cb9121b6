"""Tensors that are looked up by name for each run of the same copies, and whether one has moved since the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class BoundTensors:
    """The tensors at one end of all pieces, in the order of ``keys``."""

    def __init__(self, keys: list[Any]) -> None:
        self._keys = keys
        self._given: Mapping[Any, Tensor] | None = None
        self._addresses: list[int] = []
        self.tensors: list[Tensor] = []

    def find(self, given: Mapping[Any, Tensor]) -> bool:
        """Look the tensors up; returns True if one has moved since the last time."""
        if given is self._given:
            return False
        self.tensors = [given[key] for key in self._keys]
        self._given = given
        before, self._addresses = self._addresses, [tensor.data_ptr() for tensor in self.tensors]
        return before != self._addresses
