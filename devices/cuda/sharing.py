"""Device memory that other processes open, through the driver's IPC handles.

A handle names a whole block of torch's allocator, in which many storages lie: the block is opened once by a process
and counted.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from rlcore.devices.cuda import driver
from rlcore.devices.ipc_sharing import SharedMemory, Sharing
from rlcore.errors import DeviceError, UnsupportedError

if TYPE_CHECKING:
    from rlcore.devices.generic import GenericTorchDevice

_PAYLOAD = struct.Struct(f"<{driver.HANDLE_BYTES}sQ")
"""The block's handle, and where the storage begins in it."""


@dataclass(slots=True)
class _Block:
    start: int
    count: int = 0


@final
class CudaSharing(Sharing):
    def __init__(self, device: GenericTorchDevice) -> None:
        super().__init__(device)
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _Block] = {}

    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        address = storage.data_ptr()
        with driver.current(self._device.index):
            start = _start_of_sharable(address)
            return SharedMemory(payload=_PAYLOAD.pack(driver.ipc_handle(start), address - start))

    def block_of(self, storage: torch.UntypedStorage) -> int:
        with driver.current(self._device.index):
            return _start_of_sharable(storage.data_ptr())

    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        handle, offset = _unpack(memory)
        with self._lock, driver.current(self._device.index):
            block = self._blocks.get(handle) or _Block(driver.open_ipc_handle(handle))
            self._blocks[handle] = block
            block.count += 1
        # On this device even where a peer holds the memory: its kernels and copies reach it through the mapping.
        return torch._C._construct_storage_from_data_pointer(  # type: ignore[return-value]  # torch's stub is wrong
            block.start + offset, self._device.torch_device, storage_bytes
        )

    def close(self, memory: SharedMemory) -> None:
        handle, _ = _unpack(memory)
        with self._lock, driver.current(self._device.index):
            block = self._blocks[handle]
            block.count -= 1
            if block.count == 0:
                del self._blocks[handle]
                driver.close_ipc_handle(block.start)


def _start_of_sharable(address: int) -> int:
    """Of the block; mapped virtual memory is refused before it is asked for, as it has none of one allocation."""
    if not driver.is_ipc_capable(address):
        raise UnsupportedError(
            "export_ipc of this block of memory",
            "it is mapped virtual memory (expandable segments, or a pool with an allocator of its own) or another "
            "process's; allocate it without expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
        )
    return driver.block_start(address)


def _unpack(memory: SharedMemory) -> tuple[bytes, int]:
    if len(memory.payload) != _PAYLOAD.size:
        raise DeviceError(f"the payload of a CUDA handle has {_PAYLOAD.size} bytes, this one {len(memory.payload)}")
    handle, offset = _PAYLOAD.unpack(memory.payload)
    return handle, offset
