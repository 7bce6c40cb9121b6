"""The tensors that ZeRO keeps on a device, by tag."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.deepspeed._deepspeed_private import gradient_buffers, masters
from rlcore.engines.deepspeed.partitions import chunks
from rlcore.engines.deepspeed.zero import Zero
from rlcore.engines.offload.device_to_host import DeviceToHost
from rlcore.engines.offload.group import GradientGroup
from rlcore.engines.offload.group import optimizer_tensors as states_of
from rlcore.engines.offload.guards import Guard
from rlcore.engines.offload.storages import bytes_of, distinct_storages
from rlcore.types import OffloadReport


def optimizer_tensors(zero: Zero) -> Iterator[Tensor]:
    """Yield the float32 weights that the optimizer steps, unless the module computes with them, and its states."""
    if zero.optimizer is None:
        return
    weights = {storage.data_ptr() for storage in distinct_storages(chunks(zero.root))}
    own = masters(zero.zero_optimizer, zero.stage)
    yield from (tensor for tensor in own if tensor.untyped_storage().data_ptr() not in weights)
    yield from states_of(zero.optimizers)


class ZeroGradients(GradientGroup):
    """The gradients of a module and the buffers in which ZeRO sums them up and exchanges them."""

    def __init__(self, device: Device, zero: Zero, guard: Callable[[Guard, str], None]) -> None:
        super().__init__(device, zero.root, guard)
        own = self._tensors
        self._tensors = lambda: itertools.chain(own(), self._buffers())
        self._zero = zero
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        """The storages of the buffers, with their bytes when they are on the device."""

    def _buffers(self) -> Iterator[Tensor]:
        if self._zero.optimizer is not None:
            yield from gradient_buffers(self._zero.zero_optimizer, self._zero.stage)

    def to_host(self) -> DeviceToHost:
        self._remember()
        return super().to_host()

    def meta(self) -> OffloadReport:
        self._remember()
        report = super().meta()
        self._zero.zero()
        return report

    def set_onloaded(self) -> None:
        super().set_onloaded()
        for storage, nbytes in self._sizes:
            if not storage.nbytes():  # released: gradients start from none
                storage.resize_(nbytes)
                bytes_of(storage, 0, nbytes).zero_()

    def _remember(self) -> None:
        if not self.is_away:
            self._sizes = [(one, one.nbytes()) for one in distinct_storages(self._buffers())]
