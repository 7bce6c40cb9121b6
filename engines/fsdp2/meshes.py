"""Which ranks share what: the meshes of an engine's ranks by which a module is laid out.

Ranks are numbered by (replica, data, sequence, tensor), the last one first: neighbours share matrices, then sequences.
Experts are laid out over the same ranks by (replica, data of experts, expert).
"""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from rlcore.engines.executors.own_mesh import own_mesh
from rlcore.packed.sequence_parallel import SequenceGroup
from rlcore.parallel_plans import Meshes


class RankMeshes(NamedTuple):
    """They are the meshes of all ranks, as one rank sees them."""

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
        mesh = own_mesh(device_type, {"replicate": replicas, "shard": size // replicas})
        fsdp = _fsdp(mesh, replicas)
        return RankMeshes(fsdp, fsdp, None)
    dense = own_mesh(device_type, {"replicate": replicas, "shard": size // replicas // tensor, "tensor": tensor})
    expert = own_mesh(device_type, {"replicate": replicas, "shard": size // replicas // experts, "expert": experts})
    split = Meshes(_part(dense, 2), _part(expert, 2))
    return RankMeshes(_fsdp(dense, replicas), _fsdp(expert, replicas), split)


def sequence_group(device_type: str, size: int, *, sequences: int, tensor: int) -> SequenceGroup:
    """Return the ranks that share sequences with this one; all call it together."""
    mesh = own_mesh(device_type, {"data": size // sequences // tensor, "sequence": sequences, "alike": tensor})
    return SequenceGroup(mesh.get_group(1))


def _fsdp(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    return _part(mesh, 1) if replicas == 1 else _part(mesh, 0, 1)


def _part(mesh: DeviceMesh, *dims: int) -> DeviceMesh:
    """Return the mesh of some dimensions; of all of them, in order, ``mesh`` itself."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[tuple(names[dim] for dim in dims)]
