"""Which ranks share what: the meshes of an engine's ranks by which a module is laid out.

Ranks are numbered by (replica, data, sequence, tensor), the last one first: neighbours share matrices, then sequences.
Experts are laid out over the same ranks by (replica, data of experts, expert).
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlcore.packed.sequence_parallel import SequenceGroup
from rlcore.parallel_plans import Meshes


class RankMeshes(NamedTuple):
    """As one rank sees them."""

    fsdp: DeviceMesh
    """One dimension, or two with replicas (HSDP)."""
    experts_fsdp: DeviceMesh
    """The ranks that shard modules whose experts are on several ranks."""
    split: Meshes | None
    """None where no rank has a part of a matrix, or some of the experts."""

    @property
    def num_batches(self) -> int:
        """Return the number of ranks, or of groups of ranks, that compute other tokens."""
        return self.fsdp.size()


def rank_meshes(device_type: str, size: int, *, replicas: int, tensor: int, experts: int) -> RankMeshes:
    """Make the meshes of ``size`` ranks; all call it together."""
    if tensor == experts == 1:
        mesh = _mesh(device_type, {"replicate": replicas, "shard": size // replicas})
        fsdp = _fsdp(mesh, replicas)
        return RankMeshes(fsdp, fsdp, None)
    dense = _mesh(device_type, {"replicate": replicas, "shard": size // replicas // tensor, "tensor": tensor})
    expert = _mesh(device_type, {"replicate": replicas, "shard": size // replicas // experts, "expert": experts})
    names = dense.mesh_dim_names, expert.mesh_dim_names
    assert names[0] is not None and names[1] is not None
    split = Meshes(dense[names[0][2]], expert[names[1][2]])
    return RankMeshes(_fsdp(dense, replicas), _fsdp(expert, replicas), split)


def sequence_group(device_type: str, size: int, *, sequences: int, tensor: int) -> SequenceGroup:
    """Return the ranks that share sequences with this one; all call it together."""
    mesh = _mesh(device_type, {"data": size // sequences // tensor, "sequence": sequences, "alike": tensor})
    return SequenceGroup(mesh.get_group(1))


def _fsdp(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    assert mesh.mesh_dim_names is not None
    replicate, shard = mesh.mesh_dim_names[:2]
    if replicas == 1:
        return mesh[shard]
    return mesh if mesh.ndim == 2 else mesh[replicate, shard]


def _mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh of this engine's own.

    torch takes meshes of one shape and one set of names for equal, and caches results of operations with their mesh:
    the mesh of another engine in this process, whose groups may be gone, would come back.
    """
    world = dist.group.WORLD.group_name  # type: ignore[union-attr]
    names = tuple(f"{name}_{world}" for name in sizes)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names)
