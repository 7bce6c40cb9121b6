"""Shard arithmetic: the box of a sharded tensor that each rank holds, for weight sync, checkpoints and materialization.

A mesh dimension cuts a tensor dimension as ``torch.chunk`` does: every part has the same size but the last ones, which
are short or empty. Several mesh dimensions may cut one tensor dimension, one after the other. Where tensor parallelism
has cut it before FSDP, which is first in the mesh, torch writes ``_StridedShard``: FSDP's part is then a piece of each
of the parts that tensor parallelism made, of which the next mesh dimension chooses one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlcore._torch_private import root_of, strided_split
from rlcore.errors import UnsupportedError
from rlcore.weights.view import Box

Bounds = tuple[int, ...]
"""A box: (first, end) of dimension 0, then of dimension 1, and so on. The dimensions that are left out are whole."""

_Ranges = list[tuple[int, int]]
"""(first, end) of what a rank has of one dimension, in the order in which its own tensor has them."""


def own_box(tensor: Tensor) -> Box:
    """Return the part of a tensor that this rank holds, as a slice for each dimension; of a plain tensor all.

    Raises:
        UnsupportedError: the part is no box of the tensor.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    mesh = tensor.device_mesh
    coordinate = [mesh.get_local_rank(dim) for dim in range(mesh.ndim)]
    bounds = _bounds(tensor.shape, tensor.placements, coordinate, mesh.shape)
    if bounds is None:
        raise UnsupportedError(
            f"a tensor {list(tensor.shape)} that is laid out as {tensor.placements}",
            "what a rank holds of it is no box; shard it by Shard, or by FSDP over tensor parallelism",
        )
    return tuple(slice(*bound) for bound in bounds)


def boxes_of_ranks(tensor: DTensor, num_ranks: int) -> tuple[Bounds, ...] | None:
    """Return the box that each of ``num_ranks`` ranks holds; None where a rank holds no box of the tensor.

    A scalar is one row. A rank outside of the tensor's mesh holds none of its rows. Where that mesh has only some
    dimensions of another, such as those of FSDP without that of tensor parallelism, the ranks along the others hold
    the same.
    """
    mesh, placements = _over_all(tensor)
    ranks = mesh.mesh
    shape = tuple(tensor.shape) or (1,)
    num_dims = max((dim + 1 for dim in map(_sharded_dim, placements) if dim is not None), default=1)
    found: list[Bounds] = [(0, 0)] * num_ranks
    for coordinate in itertools.product(*map(range, ranks.shape)):
        bounds = _bounds(shape, placements, coordinate, ranks.shape)
        if bounds is None:
            return None
        found[int(ranks[coordinate])] = tuple(side for bound in bounds[:num_dims] for side in bound)
    return tuple(found)


def _over_all(tensor: DTensor) -> tuple[Any, list[Any]]:
    """Return the mesh of which the tensor's is all or some dimensions, and a placement for each of its dimensions."""
    mesh = tensor.device_mesh
    root = root_of(mesh)
    names, placements = mesh.mesh_dim_names or (), list(tensor.placements)
    if root is mesh or not names or not set(names) < set(root.mesh_dim_names or ()):
        return mesh, placements
    own = dict(zip(names, placements, strict=True))
    return root, [own.get(name, Replicate()) for name in root.mesh_dim_names]


def pairs_of(bounds: Bounds, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, end) for every dimension of a tensor of this shape."""
    given = list(zip(bounds[::2], bounds[1::2], strict=True))
    return given + [(0, size) for size in tuple(shape)[len(given) :]]


def _sharded_dim(placement: Any) -> int | None:
    """Return the dimension that a placement cuts, None where it cuts none."""
    return None if isinstance(placement, Replicate) else getattr(placement, "dim", None)


def _bounds(
    shape: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return (first, end) for each dimension of what the rank at a coordinate of a mesh holds; None if it is no box."""
    held: list[_Ranges] = [[(0, size)] for size in shape]
    for place, num_parts, placement in zip(coordinate, sizes, placements, strict=True):
        dim = _sharded_dim(placement)
        if dim is None:
            if not isinstance(placement, Replicate):
                return None
            continue
        num_before = strided_split(placement)
        if not isinstance(placement, Shard) and num_before is None:
            return None
        parts = _chunks(held[dim], num_before or 1)
        held[dim] = _joined([piece for part in parts for piece in _chunks(part, num_parts)[place]])
    if any(len(ranges) > 1 for ranges in held):
        return None
    return [ranges[0] if ranges else (size, size) for ranges, size in zip(held, shape, strict=True)]


def _chunks(ranges: _Ranges, num_parts: int) -> list[_Ranges]:
    """Cut ranges that follow each other as ``torch.chunk`` cuts a dimension; the last parts may be empty."""
    total = sum(end - first for first, end in ranges)
    size = -(-total // num_parts)
    return [_within(ranges, min(total, size * part), min(total, size * (part + 1))) for part in range(num_parts)]


def _within(ranges: _Ranges, start: int, stop: int) -> _Ranges:
    """Return positions [start, stop) of ranges that follow each other; of an empty range its place."""
    found, seen = [], 0
    for first, end in ranges:
        a, b = max(start - seen, 0), min(stop - seen, end - first)
        if a < b:
            found.append((first + a, first + b))
        seen += end - first
    if not found and ranges:
        place = ranges[0][0] + min(start, ranges[0][1] - ranges[0][0])
        return [(place, place)]
    return found


def _joined(ranges: _Ranges) -> _Ranges:
    """Join neighbours, and leave out empty ranges if there are others."""
    found: _Ranges = []
    for first, end in [one for one in ranges if one[0] < one[1]] or ranges[:1]:
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], end
        else:
            found.append((first, end))
    return found


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements that this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(sharded: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is laid out as ``sharded``, of which ``local`` is this rank's part."""
    if not isinstance(sharded, DTensor):
        return local
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def is_first_copy(tensor: Tensor) -> bool:
    """Return True on one of the ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    mesh, placements = _over_all(tensor)
    return all(
        _sharded_dim(placement) is not None or mesh.get_local_rank(mesh_dim) == 0
        for mesh_dim, placement in enumerate(placements)
    )
