"""Tensors whose memory is a private map of a file, such as the weights that ``from_pretrained`` gives on the CPU.

Torch cannot free such memory. Nobody else sees what is written to it (Linux maps it copy-on-write), so a copy in
ordinary memory can take its place. Memory that others may see, of numpy or of shared maps, is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore._torch_private import storage_key
from rlcore.device import Device

_PRIVATE_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ...p \S+ \S+ [1-9]\d* ", re.MULTILINE)
"""A line of /proc/self/maps: range of addresses, permissions, offset, device and inode, 0 where there is no file."""


def read_into_memory(tensors: Iterable[Tensor], device: Device) -> None:
    """Give each tensor of ``device`` in a private map of a file a copy; tensors that shared a storage share the copy.

    The tensor objects stay; tensors that are not given, but looked at the same storage, keep the map.
    """
    fixed = [tensor for tensor in tensors if _is_fixed(tensor, device)]
    if not fixed:
        return
    files = [range(int(start, 16), int(end, 16)) for start, end in _PRIVATE_FILE.findall(_maps())]
    storages = {storage_key(storage): storage for storage in (tensor.untyped_storage() for tensor in fixed)}
    copies = {
        key: storage.clone()  # type: ignore[no-untyped-call]
        for key, storage in storages.items()
        if any(storage.data_ptr() in addresses for addresses in files)
    }
    for tensor in fixed:
        copy = copies.get(storage_key(tensor.untyped_storage()))
        if copy is not None:
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_fixed(tensor: Tensor, device: Device) -> bool:
    """Return True if the tensor is on ``device`` and its storage cannot be freed."""
    is_plain = tensor.device == device.torch_device and not isinstance(tensor, DTensor)
    return is_plain and not tensor.untyped_storage().resizable()


def _maps() -> str:
    path = Path("/proc/self/maps")
    return path.read_text("utf-8", errors="replace") if path.exists() else ""
