"""Functions that the other process runs in tests of IPC. It reads values after all work of its device is done."""

from __future__ import annotations

from typing import Any

import torch

from rlcore.device import Device
from rlcore.types import EventHandle, IpcHandle

_mappings: dict[int, Any] = {}
_tensors: dict[int, torch.Tensor] = {}
_handles: dict[int, IpcHandle] = {}


def open_handle(device: Device, key: int, handle: bytes, close_on_revoke: bool = False) -> list[float]:
    """Import a handle under ``key`` and return its values."""
    on_revoke = (lambda mapping: mapping.close()) if close_on_revoke else None
    _mappings[key] = device.memory.import_ipc(IpcHandle.from_bytes(handle), on_revoke)
    return read(device, key)


def read(device: Device, key: int) -> list[float]:
    values: list[float] = _mappings[key].tensor.float().flatten().tolist()
    device.synchronize()
    return values


def write(device: Device, key: int, value: float) -> None:
    _mappings[key].tensor.fill_(value)
    device.synchronize()


def close(device: Device, key: int) -> None:
    device.synchronize()
    _mappings.pop(key).close()


def is_revoked(device: Device, key: int) -> bool:
    return bool(_mappings[key].is_revoked)


def address(device: Device, key: int) -> int:
    return int(_mappings[key].tensor.untyped_storage().data_ptr())


def export(device: Device, key: int, values: list[float]) -> bytes:
    _tensors[key] = torch.tensor(values, device=device.torch_device)
    device.synchronize()
    _handles[key] = device.memory.export_ipc(_tensors[key])
    return _handles[key].to_bytes()


def read_exported(device: Device, key: int) -> list[float]:
    device.synchronize()
    return list(_tensors[key].tolist())


def wait_and_read(device: Device, key: int, event: bytes) -> list[float]:
    """Return the values that a stream reads here after it has waited for another process's event."""
    stream = device.streams.new()
    device.streams.import_event(EventHandle.from_bytes(event)).wait(stream)
    with device.streams.use(stream):
        found = _mappings[key].tensor.clone()
    stream.synchronize()
    return list(found.flatten().tolist())
