"""The private names of torch that collectives need; see ``rlcore/_torch_private.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import distributed_c10d

from rlcore._torch_private import Backend, ProcessGroup, Store

_c10d: Any = distributed_c10d


def premul_sum(factor: float) -> Any:
    """Return the reduction by which NCCL multiplies this rank's values and adds them.

    ``dist.ReduceOp.PREMUL_SUM`` has no public way to its factor. Since torch 2.10.
    """
    return _make_nccl_premul_sum(factor)


def empty_group(store: Store, rank: int, world_size: int, backend: str) -> ProcessGroup:
    """Return a process group without back ends, whose default is to be ``backend``.

    The public ``new_group`` needs a default group, and all of its ranks. Since torch 2.10.
    """
    group = ProcessGroup(store, rank, world_size)
    group._set_default_backend(_backend_type(backend))
    return group


def add_backend(group: ProcessGroup, device_type: str, name: str, backend: Backend) -> None:
    """Let a group of ``empty_group`` serve tensors on a type of device. Since torch 2.10."""
    group._register_backend(torch.device(device_type), _backend_type(name), backend)


def register_group(group: ProcessGroup, name: str, world_size: int) -> None:
    """Enter a standalone group, with its own ranks, in torch's tables for functional collectives and for ranks.

    ``dist.broadcast(src=...)`` and its like look there. The table by which ``dist.destroy_process_group()`` ends groups
    does not get it. There is no public way. Since torch 2.10.
    """
    group._set_group_name(name)  # type: ignore[arg-type]  # a NewType of str
    group._set_group_desc(name)
    _c10d._register_process_group(name, group)
    _c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}


def unregister_group(group: ProcessGroup, name: str) -> None:
    """Undo ``register_group``. Since torch 2.10."""
    _c10d._unregister_process_group(name)
    _c10d._world.pg_group_ranks.pop(group, None)


def _backend_type(name: str) -> Any:
    return dist.Backend.backend_type_map[name]
