"""What a vendor gives so that processes can share its memory: how memory is named, opened and closed.

Everything else of IPC (handles, the ledger, who has what open, revocation) is the same for all devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rlcore.devices.generic import GenericTorchDevice


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """How other processes open the memory of one storage."""

    payload: bytes = b""
    """The vendor's name for it, which travels in the handle."""
    descriptor: int | None = None
    """A file descriptor of it, which travels over the exporter's socket; whoever made it gives it away."""


class Sharing(ABC):
    """Of one device, named by ``Memory.sharing_class``. No method is called for a storage of 0 bytes."""

    def __init__(self, device: GenericTorchDevice) -> None:
        self._device = device

    @abstractmethod
    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        """Make a storage of this device available to other processes, in place: its tensors stay what they are.

        Raises:
            UnsupportedError: this memory cannot be shared; says what kind can.
        """

    def blocks(self, storages: Sequence[torch.UntypedStorage]) -> list[list[torch.UntypedStorage]]:
        """Those that lie in one block of memory, which others open as a whole, together.

        What ``share`` gives for the one of a block with the lowest address, ``open`` then opens up to the end of the
        last.
        """
        return [[storage] for storage in storages]

    @abstractmethod
    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        """The storage that another process shared, without a copy, for use on this device.

        The descriptor is closed by the caller.

        Raises:
            DeviceError: it cannot be opened here; says why.
        """

    @abstractmethod
    def close(self, memory: SharedMemory) -> None:
        """End one ``open``. Queued work that uses the storage is done."""
