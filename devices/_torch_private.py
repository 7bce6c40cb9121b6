"""The private names of torch that devices need; see ``rlcore/_torch_private.py``.

Those of torch_npu are in ``devices/ascend``, with a contract of their own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def registered_backend(name: str) -> Any:
    """Return what ``Backend.register_backend`` keeps of a back end; None if nothing has registered it.

    It has ``creator_fn`` and ``extended_api``, the arguments of that call, and no public reader. Since torch 2.10.
    """
    return dist.Backend._plugins.get(name.upper())


def backend_request(*, store: Any, rank: int, world_size: int, timeout: timedelta, name: str) -> Any:
    """Return the argument that torch gives to a creator function with ``extended_api``. Since torch 2.10."""
    request = torch._C._distributed_c10d._DistributedBackendOptions()
    request.store, request.group_rank, request.group_size = store, rank, world_size
    request.timeout, request.group_id = timeout, name
    request.global_ranks_in_group = list(range(world_size))
    return request


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in the options of a back end: only ``init_process_group`` takes it. Since torch 2.10."""
    options._timeout = timeout


def gloo_options(timeout: timedelta, hostname: str) -> Any:
    """Return options by which gloo listens on the interface of ``hostname`` alone.

    The public way is the variable GLOO_SOCKET_IFNAME, for the whole process. Since torch 2.10.
    """
    library: Any = dist.ProcessGroupGloo
    options = library._Options()
    options._devices = [library.create_device(hostname=hostname)]
    set_timeout(options, timeout)
    return options


def share_by_descriptor(storage: torch.UntypedStorage) -> int:
    """Move a storage of the host into shared memory, and return its file descriptor, which torch closes.

    The public ``share_memory_()`` does not return it. Since torch 2.10.
    """
    made: Any = storage
    descriptor, _ = made._share_fd_cpu_()
    return int(descriptor)


def storage_of_descriptor(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage in the shared memory of a file descriptor. Only pickle has a public way. Since torch 2.10."""
    untyped: Any = torch.UntypedStorage
    return untyped._new_shared_fd_cpu(descriptor, nbytes)  # type: ignore[no-any-return]


def release_ipc_counter(handle: bytes, offset: int) -> None:
    """Decrement the count, in the file ``handle``, of the receivers of a tensor sent by IPC. Since torch 2.10."""
    untyped: Any = torch.UntypedStorage
    untyped._release_ipc_counter_cuda(handle, offset)
