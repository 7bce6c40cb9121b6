"""IPC of GPU memory by the driver's IPC handles.

A handle names a whole block of torch's allocator, which contains many storages. A process opens the block once, and
counts its uses.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import final

import torch

from rlcore._torch_private import storage_at
from rlcore.device import Device
from rlcore.devices.cuda import driver
from rlcore.devices.ipc.sharing import SharedMemory, Sharing
from rlcore.errors import DeviceError, UnsupportedError

_PAYLOAD = struct.Struct(f"<{driver.HANDLE_BYTES}sQ")
"""The handle of the block, and the offset of the storage in it."""


@dataclass(slots=True)
class _ImportedBlock:
    start: int
    count: int = 0


@final
class CudaSharing(Sharing):
    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _ImportedBlock] = {}

    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        address = storage.data_ptr()
        with driver.current(self._device.index):
            start, _ = _sharable_block(address)
            return SharedMemory(payload=_PAYLOAD.pack(driver.ipc_handle(start), address - start))

    def blocks(self, storages: Sequence[torch.UntypedStorage]) -> list[list[torch.UntypedStorage]]:
        """Group storages by block; the driver is asked once for each block, because there are many storages."""
        found: list[list[torch.UntypedStorage]] = []
        end = 0
        with driver.current(self._device.index):
            for address, storage in sorted(((one.data_ptr(), one) for one in storages), key=itemgetter(0)):
                if address >= end:
                    found.append([])
                    start, nbytes = _sharable_block(address)
                    end = start + nbytes
                found[-1].append(storage)
        return found

    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        handle, offset = _unpack(memory)
        with self._lock, driver.current(self._device.index):
            block = self._blocks.get(handle) or _ImportedBlock(driver.open_ipc_handle(handle))
            self._blocks[handle] = block
            block.count += 1
        # The tensor is on this device even if another GPU holds the memory: kernels here access it through the mapping.
        return storage_at(block.start + offset, self._device.torch_device, storage_bytes)

    def close(self, memory: SharedMemory) -> None:
        handle, _ = _unpack(memory)
        with self._lock, driver.current(self._device.index):
            block = self._blocks[handle]
            block.count -= 1
            if block.count == 0:
                del self._blocks[handle]
                driver.close_ipc_handle(block.start)


def _sharable_block(address: int) -> tuple[int, int]:
    """Return start and bytes of a block. Mapped virtual memory is refused first: it is not one allocation."""
    if not driver.is_ipc_capable(address):
        raise UnsupportedError(
            "export_ipc of this block of memory",
            "it is mapped virtual memory (expandable segments, or a pool with an allocator of its own) or another "
            "process's; allocate it without expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
        )
    return driver.block_at(address)


def _unpack(memory: SharedMemory) -> tuple[bytes, int]:
    if len(memory.payload) != _PAYLOAD.size:
        raise DeviceError(f"the payload of a CUDA handle has {_PAYLOAD.size} bytes, this one {len(memory.payload)}")
    handle, offset = _PAYLOAD.unpack(memory.payload)
    return handle, offset
