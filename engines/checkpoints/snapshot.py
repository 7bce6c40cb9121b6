"""Values of tensors at one moment, in host memory, for whoever writes them while the tensors change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from rlcore.device import Device
from rlcore.engines.checkpoints.tensor_file import host_pieces
from rlcore.engines.offload.chunks import Cargo, Departure, Range
from rlcore.engines.offload.copy import Transfer
from rlcore.engines.offload.host_arena import Block, arena_of


class Snapshot:
    """Those of one device are copied into its arena, at the speed of the link; what is on the host already is small."""

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        """``tensors`` are contiguous.

        Raises:
            DeviceError: the host has not so much memory; says the numbers.
        """
        self._device = device
        self._arena = arena_of(device)
        there = [tensor for tensor in tensors if self._is_there(tensor)]
        self._elsewhere = deque(tensor.clone() for tensor in tensors if not self._is_there(tensor))
        cargo = Cargo()
        if there:
            Transfer(device, self._arena, [Departure(cargo, map(_range_of, there), frees=False)], []).run()
        # The ranges would hold the storages on the device.
        self._held = deque((parcel.block, deque(parcel.pairs()[0])) for parcel in cargo.parcels)

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """The bytes that ``tensor`` had, as uint8. Each tensor once, in their order: what was read is free again."""
        if not self._is_there(tensor):
            yield from host_pieces(self._elsewhere.popleft())
            return
        missing = tensor.nbytes
        while missing:
            block, views = self._held[0]
            missing -= views[0].numel()
            yield views.popleft()
            if not views:
                self._held.popleft()
                self._give(block)

    def release(self) -> None:
        """Of what was not read, too."""
        while self._held:
            self._give(self._held.popleft()[0])

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device == self._device.torch_device and tensor.nbytes > 0

    def _give(self, block: Block | None) -> None:
        assert block is not None
        self._arena.give(block)


def _range_of(tensor: Tensor) -> Range:
    storage = tensor.untyped_storage()
    return Range(storage, storage.nbytes(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)
