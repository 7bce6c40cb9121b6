"""Host memory in which many storages lie in one block, as on a GPU: what is opened is the block."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from rlcore.devices.ipc.sharing import SharedMemory, Sharing

BLOCK_BYTES = 1 << 16


class OneBlock(Sharing):
    opened: ClassVar[list[int]] = []
    """Offset of each ``open`` in this process."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._descriptor = os.memfd_create("block")
        os.ftruncate(self._descriptor, BLOCK_BYTES)
        self._block = _mapped(self._descriptor)

    def tensor(self, offset: int, values: list[float]) -> torch.Tensor:
        """float32, in a storage of its own that begins at a byte of the block."""
        storage = _storage(self._block, offset, 4 * len(values))
        tensor = torch.empty(0).set_(storage, 0, (len(values),), (1,))
        return tensor.copy_(torch.tensor(values))

    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        offset = storage.data_ptr() - int(self._block.ctypes.data)
        return SharedMemory(offset.to_bytes(8), os.dup(self._descriptor))

    def blocks(self, storages: Sequence[torch.UntypedStorage]) -> list[list[torch.UntypedStorage]]:
        return [list(storages)]

    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        assert memory.descriptor is not None
        offset = int.from_bytes(memory.payload)
        self.opened.append(offset)
        self._block = _mapped(memory.descriptor)  # kept while the test runs
        return _storage(self._block, offset, storage_bytes)

    def close(self, memory: SharedMemory) -> None:
        """The mapping is kept."""


def _mapped(descriptor: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, BLOCK_BYTES), dtype=np.uint8)


def _storage(block: np.ndarray, offset: int, nbytes: int) -> torch.UntypedStorage:
    at = int(block.ctypes.data) + offset
    return torch._C._construct_storage_from_data_pointer(at, torch.device("cpu"), nbytes)  # type: ignore[return-value]
