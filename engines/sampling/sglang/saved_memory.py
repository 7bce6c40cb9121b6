"""Memory under torch_memory_saver's tags, moved by the host arena: unmapped, and mapped again at its addresses.

Captured graphs keep addresses, so storages cannot be freed and allocated anew. A ``SavedStorage`` takes the place of a
storage in ``engines/offload``; the saver unmaps all of a tag at once, when the last of its storages has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlcore import _torch_private
from rlcore.device import Device
from rlcore.engines.offload.storages import bytes_of, distinct_storages
from rlcore.engines.sampling.replica.addressed_group import AddressedGroup
from rlcore.engines.sampling.sglang import versions
from rlcore.errors import DeviceError


class Region:
    """All memory under one tag.

    Args:
        sizes: the bytes of each of its storages, by its address.
    """

    def __init__(self, device: Device, tag: str, sizes: Mapping[int, int]) -> None:
        self._device = device
        self._tag = tag
        self._sizes = sizes
        self._left: set[int] = set()
        self.is_mapped = True

    def leave(self, address: int) -> None:
        """Give up a storage; the last gives the memory of all to the driver.

        Raises:
            DeviceError: nothing was given: the saver is not in place in this process.
        """
        self._left.add(address)
        if self._left != self._sizes.keys():
            return
        before = self._device.memory.info().free_bytes
        versions.memory_saver().pause(self._tag)
        self.is_mapped = False
        freed, total = self._device.memory.info().free_bytes - before, sum(self._sizes.values())
        if freed < total // 2:  # other programs may take some meanwhile
            raise DeviceError(
                f"SGLang's {self._tag} on {self._device.name} gave {freed} of {total} bytes to the driver: "
                "torch_memory_saver was not preloaded, because the loader does not find CUDA's runtime. Add the folder "
                "of libcudart.so to LD_LIBRARY_PATH before the program starts"
            )

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
    """A tag whose memory is the saver's."""

    def __init__(
        self,
        device: Device,
        tag: str,
        tensors: Callable[[], Iterable[Tensor]],
        kept: Callable[[], Iterable[Tensor]],
    ) -> None:
        super().__init__(device, tensors, kept)
        storages = distinct_storages(tensors())
        region = Region(device, tag, {storage.data_ptr(): storage.nbytes() for storage in storages})
        self._saved = [SavedStorage(storage, region) for storage in storages]

    def _storages(self) -> list[Any]:
        return list(self._saved)
