"""Where the trainer's weights are: numbered parameters, the rows that each rank holds, and each weight's place in them.

Every rank of the trainer computes the same manifest from its own module, without communication; equal digests prove it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlcore.engines.fsdp2.sharding import local_part
from rlcore.engines.weight_sync.endpoint import decoded
from rlcore.errors import SyncError
from rlcore.tensor_data import dtype_name

if TYPE_CHECKING:
    from rlcore.weights.view import WeightView

Rows = tuple[int, int]
"""[first, end) of dimension 0."""
_Message = TypeVar("_Message", bound="Message")


class Message(msgspec.Struct, frozen=True, dict=True):
    """Plain data with a digest, that travels as msgpack."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls: type[_Message], data: bytes) -> _Message:
        """Raises SyncError for anything but what ``to_bytes`` wrote."""
        return decoded(data, cls, f"{cls.__name__} of a weight sync")

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of ``to_bytes()``, in hexadecimal: fields have one order, and numbers one encoding."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


class Parameter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that the trainer holds, whole or by rows; its elements are numbered row by row."""

    shape: tuple[int, ...]
    dtype: str
    """Such as "bfloat16"."""
    layout: int
    """Which of ``Manifest.layouts`` says which rank has which rows."""

    @property
    def row_numel(self) -> int:
        """Elements of a row; a scalar is one row."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Weight(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an engine's loader is given under ``name``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parameter: int | None
    """The parameter that it is a view of. None: it is no view of one that is held by rows, and is sent whole."""
    offset: int
    """In the parameter's elements, as are strides."""
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Manifest(Message, frozen=True):
    """All that a receiver must know of the trainer's weights."""

    num_ranks: int
    parameters: tuple[Parameter, ...]
    weights: tuple[Weight, ...]
    layouts: tuple[tuple[Rows, ...], ...]
    """For each rank the rows it has: none or all of those of another rank, its replica, and none of others'."""


class Source:
    """A trainer rank's side of a manifest."""

    def __init__(self, manifest: Manifest, parameters: Sequence[Tensor]) -> None:
        self.manifest = manifest
        self._parameters = parameters

    @torch.no_grad()
    def local_parameters(self) -> list[Tensor]:
        """The module's own tensors, of which ``parts`` are aliases."""
        return [local_part(parameter) for parameter in self._parameters]

    def parts(self) -> list[Tensor]:
        """What this rank holds of each parameter, in the manifest's order and its memory: [rows, ...], contiguous."""
        return [_part(parameter) for parameter in self._parameters]


def _part(parameter: Tensor) -> Tensor:
    return local_part(parameter.detach())


def describe(views: Iterable[WeightView], num_ranks: int) -> Source:
    """The manifest of ``module.weight_views()``, the same on each of ``num_ranks`` ranks. Reads no values."""
    describer = _Describer(num_ranks)
    weights = tuple(describer.weight(view) for view in views)
    manifest = Manifest(num_ranks, tuple(describer.described), weights, tuple(describer.layouts))
    return Source(manifest, describer.parameters)


class _Describer:
    def __init__(self, num_ranks: int) -> None:
        self.parameters: list[Tensor] = []
        self.described: list[Parameter] = []
        self.layouts: dict[tuple[Rows, ...], int] = {}
        self._num_ranks = num_ranks
        self._indices: dict[int, int | None] = {}
        self._known: dict[Any, tuple[Rows, ...] | None] = {}

    def weight(self, found: WeightView) -> Weight:
        name, parameter, view = found[:3]
        index = None if parameter is None else self._index(parameter)
        return Weight(name, tuple(view.shape), dtype_name(view.dtype), index, int(view.storage_offset()), view.stride())

    def _index(self, parameter: Tensor) -> int | None:
        if id(parameter) not in self._indices:
            self._indices[id(parameter)] = self._add(parameter)
        return self._indices[id(parameter)]

    def _add(self, parameter: Tensor) -> int | None:
        rows = self._rows(parameter)
        if rows is None or not _part(parameter).is_contiguous():
            return None
        layout = self.layouts.setdefault(rows, len(self.layouts))
        self.parameters.append(parameter)
        self.described.append(Parameter(tuple(parameter.shape), dtype_name(parameter.dtype), layout))
        return len(self.parameters) - 1

    def _rows(self, parameter: Tensor) -> tuple[Rows, ...] | None:
        size = parameter.shape[0] if parameter.dim() else 1
        if not isinstance(parameter, DTensor):
            return ((0, size),) * self._num_ranks
        key = parameter.device_mesh, parameter.placements, size
        if key not in self._known:
            self._known[key] = _sharded_rows(parameter, size, self._num_ranks)
        return self._known[key]


def _sharded_rows(parameter: DTensor, size: int, num_ranks: int) -> tuple[Rows, ...] | None:
    """By rank; None if it is not sharded by rows alone."""
    mesh = parameter.device_mesh.mesh
    found = [(0, 0)] * num_ranks
    for coordinate in torch.cartesian_prod(*map(torch.arange, mesh.shape)).reshape(-1, mesh.dim()).tolist():
        first, end = 0, size
        for place, parts, placement in zip(coordinate, mesh.shape, parameter.placements, strict=True):
            if type(placement) is Shard and placement.dim == 0:
                chunk = -(-(end - first) // parts)  # as torch.chunk: the last are short, or empty
                first = min(end, first + chunk * place)
                end = min(end, first + chunk)
            elif type(placement) is not Replicate:
                return None
        found[int(mesh[tuple(coordinate)])] = first, end
    return tuple(found)


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SyncError(f"{name!r} is no dtype of this torch {torch.__version__}")
    return found
