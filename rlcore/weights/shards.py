"""Shard arithmetic: the part of a sharded tensor that each rank holds.

A mesh dimension cuts a tensor dimension as ``torch.chunk`` does: every part has the same size but the last ones, which
are short or empty. Several mesh dimensions may cut one tensor dimension, one after the other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlcore.weights.view import Box

Rows = tuple[int, int]
"""[first, end) of dimension 0."""


def own_box(tensor: Tensor) -> Box:
    """Return the part of a tensor that this rank holds, as a slice for each dimension; of a plain tensor all."""
    bounds = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for mesh_dim, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                bounds[placement.dim] = _chunk(
                    bounds[placement.dim], mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
                )
    return tuple(slice(*bound) for bound in bounds)


def rows_of_ranks(tensor: DTensor, num_ranks: int) -> tuple[Rows, ...] | None:
    """Return the rows that each of ``num_ranks`` ranks holds; None where the tensor is not sharded by rows alone.

    A scalar is one row. A rank outside of the tensor's mesh holds none.
    """
    mesh = tensor.device_mesh.mesh
    size = tensor.shape[0] if tensor.dim() else 1
    found = [(0, 0)] * num_ranks
    for coordinate in torch.cartesian_prod(*map(torch.arange, mesh.shape)).reshape(-1, mesh.dim()).tolist():
        rows = 0, size
        for place, num_parts, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
            if type(placement) is Shard and placement.dim == 0:
                rows = _chunk(rows, place, num_parts)
            elif type(placement) is not Replicate:
                return None
        found[int(mesh[tuple(coordinate)])] = rows
    return tuple(found)


def _chunk(bounds: tuple[int, int], place: int, num_parts: int) -> tuple[int, int]:
    """Return the bounds of part number ``place``."""
    start, stop = bounds
    size = -(-(stop - start) // num_parts)
    start = min(stop, start + size * place)
    return start, min(stop, start + size)


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
    mesh = tensor.device_mesh
    return all(
        isinstance(placement, Shard) or mesh.get_local_rank(mesh_dim) == 0
        for mesh_dim, placement in enumerate(tensor.placements)
    )
