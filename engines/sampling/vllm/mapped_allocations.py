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
from rlcore.engines.offload.device_to_host import DeviceToHost
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.offload.storages import bytes_of
from rlcore.engines.sampling.vllm import ascend, versions
from rlcore.engines.sampling.vllm.interfaces import VllmAllocation
from rlcore.types import OffloadReport


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


class MappedGroup(OffloadGroup):
    """A tag whose memory is vLLM's.

    Args:
        kept: small tensors in that memory whose values are kept over a release, such as rotary tables: no sync sends
            them again.
    """

    def __init__(self, device: Device, tag: str, kept: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(device, tuple, lambda guard, state: None)
        self._tag = tag
        self._kept = kept
        self._copies: list[tuple[Tensor, Tensor]] = []

    def _storages(self) -> list[Any]:
        return [MappedAllocation(allocation, self.device) for allocation in _memory().allocations(self._tag)]

    @property
    def device_bytes(self) -> int:
        return sum(region.nbytes() for region in self._storages())

    def to_host(self) -> DeviceToHost:
        self._prepare_to_leave()
        return super().to_host()

    def meta(self) -> OffloadReport:
        if not self.is_away:
            self._prepare_to_leave()
        return super().meta()

    def set_onloaded(self) -> None:
        super().set_onloaded()
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def _prepare_to_leave(self) -> None:
        """Wait for all work that uses the memory: unmapping does not, and a wait for each piece would stop copies."""
        self.device.synchronize()
        self._copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._kept()]
