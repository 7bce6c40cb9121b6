"""Memory of vLLM's allocator, moved by the host arena: unmapped, and mapped again at the address it had.

Captured graphs keep addresses, so storages cannot be freed and allocated anew. A ``MappedAllocation`` takes the place
of a storage in ``engines/offload``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.offload.storages import bytes_of
from rlcore.engines.sampling.replica.addressed_group import AddressedGroup
from rlcore.engines.sampling.vllm import ascend, versions
from rlcore.engines.sampling.vllm.interfaces import VllmAllocation


def _memory() -> Any:
    """Return the module with the functions of the installed allocator."""
    return ascend if ascend.is_installed() else versions


class MappedAllocation:
    """One allocation, with the methods of a storage that offload uses."""

    def __init__(self, allocation: VllmAllocation, device: Device) -> None:
        self._allocation = allocation
        self.device: torch.device = device.torch_device
        _, self._size, self.address, *_ = allocation.handle

    @property
    def _cdata(self) -> int:
        return int(self.address)

    def nbytes(self) -> int:
        return 0 if self._allocation.is_asleep else int(self._size)

    def resize_(self, nbytes: int) -> None:
        """0 gives the unused memory to the driver; any other number takes as much as there was."""
        if bool(nbytes) == self._allocation.is_asleep:
            _memory().set_mapped(self._allocation, bool(nbytes))


@bytes_of.register
def _(storage: MappedAllocation, start: int, nbytes: int) -> Tensor:
    found = _memory().storage_at(storage.address + start, storage.device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(found)


class MappedGroup(AddressedGroup):
    """A tag whose memory is vLLM's."""

    def __init__(self, device: Device, tag: str, kept: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(device, tuple, kept)
        self._tag = tag

    def _storages(self) -> list[Any]:
        return [MappedAllocation(allocation, self.device) for allocation in _memory().allocations(self._tag)]
