"""A ``torch.distributed.ProcessGroup`` that is nobody's default. The one place that uses torch's private names for it.

Torch keeps tables about groups: the ranks that functions such as ``dist.broadcast(src=...)`` translate, and names for
functional collectives. A standalone group is entered into these two, with its own ranks, and into no other: what
``dist.destroy_process_group()`` goes through to end a program's groups does not reach it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

_c10d: Any = distributed_c10d
_numbers = itertools.count(1)


def make_process_group(host: Any, device: Any, store: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The group for tensors of the device, and the one for host tensors: one object unless the library forbids it.

    Args:
        host, device: devices; equal where the device is the host.
        options: of ``new_backend`` of their collectives.
    """
    rank, world_size, name = options["rank"], options["world_size"], f"{options['name']} {next(_numbers)}"
    on_host = options | {"is_high_priority": options["is_high_priority"] and host is device}
    host_backend = host.collectives.new_backend(PrefixStore("host", store), **on_host)
    if host is device:
        group = host_backend if isinstance(host_backend, dist.ProcessGroup) else _shell(store, rank, world_size, host)
        if group is not host_backend:
            _add(group, host, host_backend)
        return _named(group, name), group
    group = _shell(store, rank, world_size, device)
    group.bound_device_id = device.torch_device
    _add(group, host, host_backend)
    backend = device.collectives.new_backend(PrefixStore("device", store), **options)
    if isinstance(backend, dist.ProcessGroup):  # torch has such a group stand alone
        return _named(backend, name), _named(group, f"{name} host")
    _add(group, device, backend)
    _named(group, name)
    if backend.supports_splitting:
        backend.eager_connect_single_device(device.torch_device)
    return group, group


def unmake_process_group(group: Any, *, is_broken: bool) -> None:
    """End a group and take it out of torch's tables. A broken one does not wait for the other ranks."""
    _c10d._unregister_process_group(group.group_name)
    _c10d._world.pg_group_ranks.pop(group, None)
    group.abort() if is_broken else group.shutdown()


def _shell(store: Any, rank: int, world_size: int, device: Any) -> Any:
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(_backend_type(device))
    return group


def _add(group: Any, device: Any, backend: Any) -> None:
    group._register_backend(torch.device(device.type), _backend_type(device), backend)


def _backend_type(device: Any) -> Any:
    return dist.Backend.backend_type_map[device.collectives.backend]


def _named(group: Any, name: str) -> Any:
    group._set_group_name(name)
    group._set_group_desc(name)
    _c10d._register_process_group(name, group)
    _c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    return group
