"""The manifest of a trainer: its numbered parameters, the box that each rank holds, and the weights as views of them.

Every rank of the trainer computes the same manifest from its own module, without communication; equal digests prove it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore.engines.weight_sync.messages import Message
from rlcore.engines.weight_sync.planning.strided_copy import Copy, canonical, dense
from rlcore.errors import SyncError
from rlcore.tensor_data import dtype_name
from rlcore.weights.shards import Bounds, boxes_of_ranks, local_part, pairs_of

if TYPE_CHECKING:
    from rlcore.weights.view import WeightView


class Parameter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that the trainer holds, whole or in boxes. Its elements are numbered row by row."""

    shape: tuple[int, ...]
    dtype: str
    """Its name in torch, such as "bfloat16"."""
    layout: int
    """Index in ``WeightManifest.layouts``, which say the box of each rank."""

    def held(self, bounds: Bounds) -> Copy:
        """Return a rank's box as a copy, from the numbers of its elements in the rank's own memory to theirs here."""
        sides = pairs_of(bounds, self.shape or (1,))
        shape, stride = tuple(end - first for first, end in sides), dense(self.shape or (1,))
        first = sum(side[0] * step for side, step in zip(sides, stride, strict=True))
        return canonical(Copy(shape, 0, dense(shape), first, stride))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Weight(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that an engine's loader is given under ``name``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parameter: int | None
    """Number of the parameter that it is a view of; None where it is sent whole, as no view of one held in boxes."""
    offset: int
    """In elements of the parameter, as are strides."""
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class WeightManifest(Message, frozen=True):
    """All that a receiver must know of the trainer's weights."""

    label: ClassVar[str] = "Manifest"

    num_ranks: int
    parameters: tuple[Parameter, ...]
    weights: tuple[Weight, ...]
    layouts: tuple[tuple[Bounds, ...], ...]
    """For each rank the box that it has. Two ranks have the same box, as replicas, or no element in common."""

    def __post_init__(self) -> None:
        odd = next((box for layout in self.layouts for box in layout if len(box) < 2 or len(box) % 2), None)
        if odd is not None:
            raise ValueError(f"a box has (first, end) of one dimension after the other, got {odd}")


class RankParameters:
    """The parameters of one trainer rank, in the order of its manifest."""

    def __init__(self, manifest: WeightManifest, parameters: Sequence[Tensor]) -> None:
        self.manifest = manifest
        self._parameters = parameters

    @torch.no_grad()
    def local_parameters(self) -> list[Tensor]:
        """Return this rank's own tensors, of which ``parts`` are aliases."""
        return [local_part(parameter) for parameter in self._parameters]

    def parts(self) -> list[Tensor]:
        """Return what this rank holds of each parameter, its box contiguous, in the parameter's own memory."""
        return [_part(parameter) for parameter in self._parameters]


def _part(parameter: Tensor) -> Tensor:
    return local_part(parameter.detach())


def describe(views: Iterable[WeightView], num_ranks: int) -> RankParameters:
    """Describe ``module.weight_views()`` for each of ``num_ranks`` ranks alike. Reads no values."""
    describer = _Describer(num_ranks)
    weights = tuple(describer.weight(view) for view in views)
    manifest = WeightManifest(num_ranks, tuple(describer.described), weights, tuple(describer.layouts))
    return RankParameters(manifest, describer.parameters)


class _Describer:
    def __init__(self, num_ranks: int) -> None:
        self.parameters: list[Tensor] = []
        self.described: list[Parameter] = []
        self.layouts: dict[tuple[Bounds, ...], int] = {}
        self._num_ranks = num_ranks
        self._indices: dict[int, int | None] = {}
        self._known: dict[Any, tuple[Bounds, ...] | None] = {}  # by mesh, placements and shape

    def weight(self, found: WeightView) -> Weight:
        name, parameter, view = found[:3]
        index = None if parameter is None else self._index(parameter)
        return Weight(name, tuple(view.shape), dtype_name(view.dtype), index, int(view.storage_offset()), view.stride())

    def _index(self, parameter: Tensor) -> int | None:
        if id(parameter) not in self._indices:
            self._indices[id(parameter)] = self._add(parameter)
        return self._indices[id(parameter)]

    def _add(self, parameter: Tensor) -> int | None:
        boxes = self._boxes(parameter)
        if boxes is None or not _part(parameter).is_contiguous():
            return None
        layout = self.layouts.setdefault(boxes, len(self.layouts))
        self.parameters.append(parameter)
        self.described.append(Parameter(tuple(parameter.shape), dtype_name(parameter.dtype), layout))
        return len(self.parameters) - 1

    def _boxes(self, parameter: Tensor) -> tuple[Bounds, ...] | None:
        if not isinstance(parameter, DTensor):
            return ((0, parameter.shape[0] if parameter.dim() else 1),) * self._num_ranks
        key = parameter.device_mesh, parameter.placements, parameter.shape
        if key not in self._known:
            self._known[key] = boxes_of_ranks(parameter, self._num_ranks)
        return self._known[key]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as "bfloat16"; raises SyncError for a name that this torch does not have."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SyncError(f"{name!r} is no dtype of this torch {torch.__version__}")
    return found
