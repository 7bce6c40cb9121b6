"""The storages behind a set of tensors, and whether they can leave the device.

A storage is freed and refilled in place (``untyped_storage().resize_``) rather than replaced, so that every parameter,
DTensor and optimizer state that looks at it stays the same object.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore._torch_private import storage_key
from rlcore.device import Device
from rlcore.errors import StateError, UnsupportedError


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return every storage once, in order; tied parameters and views share one."""
    return list({storage_key(storage): storage for storage in map(_storage_of, tensors)}.values())


def freeable_storages(tensors: Iterable[Tensor], device: Device) -> list[torch.UntypedStorage]:
    """Return the storages in the memory of ``device``; an optimizer of an accelerator has its step counts on the host.

    Raises:
        UnsupportedError: a storage belongs to a file or to numpy, so that it cannot be freed, or is in shared memory
            of the host, which torch cannot grow again.
        StateError: a storage is exported, so another process may use it.
    """
    exported = _exported_addresses(device)
    found = {}
    for tensor in tensors:
        storage = _storage_of(tensor)
        if storage_key(storage) in found or not storage.nbytes() or storage.device != device.torch_device:
            continue
        if storage.data_ptr() in exported:
            raise StateError(
                f"a tensor of shape {list(tensor.shape)} on {device.name} is exported to other processes, which may "
                "read it while it is freed; call device.memory.revoke(handle) first"
            )
        _check_can_be_freed(storage, tensor, device)
        found[storage_key(storage)] = storage
    return list(found.values())


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _check_can_be_freed(storage: torch.UntypedStorage, tensor: Tensor, device: Device) -> None:
    if not storage.resizable():
        raise UnsupportedError(
            f"offloading a tensor of shape {list(tensor.shape)} made from a file or a numpy array",
            "torch cannot free its storage; give the module or optimizer tensor.clone() instead",
        )
    if device.spec.is_host and storage.is_shared():
        raise UnsupportedError(
            f"offloading a tensor of shape {list(tensor.shape)} that is in shared memory of the host, as after "
            "export_ipc or share_memory_",
            "torch crashes when such a storage grows again; put tensor.clone() in its place",
        )


def _exported_addresses(device: Device) -> set[int]:
    try:
        return {export.address for export in device.memory.ledger()}
    except UnsupportedError:  # then nothing is exported
        return set()


@functools.singledispatch
def bytes_of(storage: Any, start: int, nbytes: int) -> Tensor:
    """Return [nbytes] uint8, a view of a range of the storage. Memory that is no torch storage registers its own."""
    found: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))
    return found


def owned(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage can be freed and refilled in place: a clone of memory maps and numpy's memory."""
    return tensor if tensor.untyped_storage().resizable() else tensor.clone()
