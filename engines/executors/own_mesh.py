"""Meshes of an engine's own ranks, which torch does not take for those of another engine."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def own_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh of this engine's ranks, whose dimensions have these sizes; all ranks call it together.

    torch takes meshes of one shape and one set of names for equal, and caches results of operations with their mesh:
    the mesh of another engine in this process, whose groups may be gone, would come back.
    """
    world = dist.group.WORLD.group_name  # type: ignore[union-attr]
    names = tuple(f"{name}_{world}" for name in sizes)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names)
