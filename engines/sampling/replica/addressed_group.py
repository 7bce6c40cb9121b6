"""An offload group whose memory is unmapped and mapped again at its addresses, which captured graphs keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from rlcore.device import Device
from rlcore.engines.offload.group import OffloadGroup


class AddressedGroup(OffloadGroup):
    """A tag whose memory belongs to another project's allocator; a derived class lists its ``_storages``.

    Args:
        tensors: lists the tensors of the group.
        kept: small tensors in that memory whose values are kept over a release, such as rotary tables: no sync sends
            them again.
    """

    def __init__(
        self, device: Device, tensors: Callable[[], Iterable[Tensor]], kept: Callable[[], Iterable[Tensor]]
    ) -> None:
        super().__init__(device, tensors, before_leaving=self._keep)
        self._kept = kept
        self._copies: list[tuple[Tensor, Tensor]] = []

    @property
    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages())

    def set_onloaded(self) -> None:
        super().set_onloaded()
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def _keep(self) -> None:
        """Wait for all work that uses the memory: unmapping does not, and a wait for each piece would stop copies."""
        self.device.synchronize()
        self._copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._kept()]
