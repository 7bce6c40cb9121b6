"""Named tensors as a program gives them to a ``WeightSender``: described once, and in later rounds only looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore._torch_private import numbers_of_writes
from rlcore.engines.weight_sync.planning.manifest import WeightManifest, describe
from rlcore.errors import StateError, SyncError
from rlcore.weights.names import mismatch
from rlcore.weights.shards import local_part
from rlcore.weights.view import WeightView, whole

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class NamedSourceTensors:
    """The ``SourceTensors`` of named tensors of one rank, sharded or whole.

    Args:
        get: returns the tensors, in the same order each time.
        num_ranks: how many ranks have a part of them.
    """

    def __init__(self, get: Callable[[], NamedTensors], num_ranks: int) -> None:
        self._get = get
        self._num_ranks = num_ranks
        self._manifest: WeightManifest | None = None
        self._names: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._layouts: list[tuple[Any, ...]] = []
        self._addresses: list[int] = []
        self._parts: list[Tensor] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the tensors as they are now. They are described again only where their layout has changed.

        Raises:
            SyncError: they are not those of the first time.
        """
        tensors = dict(self._get())
        given = list(tensors.values())
        if list(tensors) != self._names or not all(map(_is_laid_out, given, self._layouts)):
            self._describe(tensors)
        addresses = [local_part(tensor).data_ptr() for tensor in given]
        if addresses != self._addresses or list(map(id, given)) != list(map(id, self._tensors.values())):
            weights = zip(given, self.manifest.weights, strict=True)
            self._parts = [local_part(one.detach()) for one, weight in weights if weight.parameter is not None]
        self._tensors, self._addresses = tensors, addresses

    def _describe(self, tensors: Mapping[str, Tensor]) -> None:
        manifest = describe((_view(*item) for item in tensors.items()), self._num_ranks).manifest
        if self._manifest is not None and manifest.digest != self._manifest.digest:
            before, now = ({weight.name: weight for weight in one.weights} for one in (self._manifest, manifest))
            found = mismatch(before, now) or "their dtypes, order or sharding are others"
            raise SyncError(f"the tensors are not those that this sender was first given: {found}; make a new sender")
        self._manifest, self._names = manifest, list(tensors)
        self._layouts = [_layout(tensor) for tensor in tensors.values()]

    def forget(self) -> None:
        """Hold no tensor until the next ``refresh``, which describes only what is laid out otherwise."""
        self._tensors, self._addresses, self._parts = {}, [], []

    @property
    def manifest(self) -> WeightManifest:
        if self._manifest is None:
            raise StateError("the sender has no tensors yet; call send()")
        return self._manifest

    def parts(self) -> list[Tensor]:
        return self._parts

    @torch.no_grad()
    def compute(self, weights: Sequence[int]) -> list[Tensor]:
        tensors = list(self._tensors.values())
        return [whole(tensors[number]).contiguous() for number in weights]

    def changes(self) -> list[int]:
        return numbers_of_writes(chain(self._parts, self._tensors.values()))  # a write through a DTensor is no part's


def _view(name: str, tensor: Tensor) -> WeightView:
    """Return a tensor as a parameter of its own, also where one tensor has two names."""
    return WeightView(name, tensor.detach(), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor that a manifest depends on."""
    plain = tensor.dtype, tensor.shape, tensor.stride()
    if not isinstance(tensor, DTensor):
        return plain
    return (*plain, tensor.device_mesh, tensor.placements, tensor.to_local().stride())


def _is_laid_out(tensor: Tensor, layout: tuple[Any, ...]) -> bool:
    if isinstance(tensor, DTensor) or len(layout) > 3:
        return _layout(tensor) == layout
    return tensor.dtype is layout[0] and tensor.shape == layout[1] and tensor.stride() == layout[2]
