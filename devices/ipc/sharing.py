"""The interface by which a vendor shares device memory between processes: name a storage, open it, close it.

The rest of IPC (handles, the ledger, open mappings, revocation) is the same for all devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlcore.device import Device


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The data with which other processes open the memory of one storage."""

    payload: bytes = b""
    """The vendor's handle of the memory, which is a field of the ``IpcHandle``."""
    descriptor: int | None = None
    """A file descriptor of the memory, which the exporter sends over its socket and closes at the end."""


class Sharing(ABC):
    """The sharing of one device, named by ``Memory.sharing_class``. Storages of 0 bytes never reach it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @abstractmethod
    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        """Make a storage of this device available to other processes, in place: its tensors stay valid.

        Raises:
            UnsupportedError: this memory cannot be shared; says what kind can.
        """

    def blocks(self, storages: Sequence[torch.UntypedStorage]) -> list[list[torch.UntypedStorage]]:
        """Group storages by the block of memory that importers open as a whole.

        ``share`` is called with the storage of the lowest address in a block; ``open`` then opens all bytes up to the
        end of the last storage.
        """
        return [[storage] for storage in storages]

    @abstractmethod
    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        """Open the storage of another process without a copy, for use on this device.

        The caller closes the descriptor.

        Raises:
            DeviceError: it cannot be opened here; says why.
        """

    @abstractmethod
    def close(self, memory: SharedMemory) -> None:
        """Undo one ``open``. Queued work that uses the storage is done."""
