"""Memory under torch_memory_saver's tags, moved by the host arena: unmapped, and mapped again at its addresses.

Captured graphs keep addresses, so storages cannot be freed and allocated anew. A ``SavedStorage`` takes the place of a
storage in ``engines/offload``; the saver unmaps all of a tag at once, when the last of its storages has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rlcore import _torch_private
from rlcore.device import Device
from rlcore.engines.offload.storages import bytes_of, distinct_storages
from rlcore.engines.sampling.replica.addressed_group import AddressedGroup
from rlcore.engines.sampling.sglang import versions


class Region:
    """All memory under one tag.

    Args:
        addresses: of its storages.
    """

    def __init__(self, tag: str, addresses: set[int]) -> None:
        self._tag = tag
        self._addresses = addresses
        self._left: set[int] = set()
        self.is_mapped = True

    def leave(self, address: int) -> None:
        """Give up a storage; the last gives the memory of all to the driver."""
        self._left.add(address)
        if self._left == self._addresses:
            versions.memory_saver().pause(self._tag)
            self.is_mapped = False

    def come_back(self, address: int) -> None:
        if not self.is_mapped:
            versions.memory_saver().resume(self._tag)
            self.is_mapped = True
        self._left.discard(address)

    def has_left(self, address: int) -> bool:
        return address in self._left


class SavedStorage:
    """One storage in a region, with the methods of a storage that offload uses."""

    def __init__(self, storage: torch.UntypedStorage, region: Region) -> None:
        self.device: torch.device = storage.device
        self.address = storage.data_ptr()
        self._size = storage.nbytes()
        self._region = region

    @property
    def _cdata(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return 0 if self._region.has_left(self.address) else self._size

    def resize_(self, nbytes: int) -> None:
        """0 gives up the memory; any other number takes as much as there was."""
        (self._region.come_back if nbytes else self._region.leave)(self.address)


@bytes_of.register
def _(storage: SavedStorage, start: int, nbytes: int) -> Tensor:
    found = _torch_private.storage_at(storage.address + start, storage.device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(found)


class SavedGroup(AddressedGroup):
    """A tag whose memory is the saver's.

    Raises:
        DeviceError: as ``versions.require_memory_saver``.
    """

    def __init__(
        self,
        device: Device,
        tag: str,
        tensors: Callable[[], Iterable[Tensor]],
        kept: Callable[[], Iterable[Tensor]],
    ) -> None:
        super().__init__(device, tensors, kept)
        versions.require_memory_saver()
        storages = distinct_storages(tensors())
        region = Region(tag, {storage.data_ptr() for storage in storages})
        self._saved = [SavedStorage(storage, region) for storage in storages]

    def _storages(self) -> list[Any]:
        return list(self._saved)
