"""A copy of tensors at one moment, in host memory, that is written while the tensors change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from rlcore import held_memory
from rlcore.device import Device
from rlcore.engines.checkpoints.tensor_file import host_pieces
from rlcore.engines.offload.chunks import Chunk, StorageRange
from rlcore.engines.offload.device_to_host import DeviceToHost
from rlcore.engines.offload.host_arena import HostBlock, arena_of
from rlcore.engines.offload.transfer import Transfer


class Snapshot:
    """Tensors of one device are copied into its arena, at the speed of the link; others are small and are cloned."""

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        """``tensors`` are contiguous.

        Raises:
            DeviceError: the host has too little memory; the message gives the numbers.
        """
        self._device = device
        self._arena = arena_of(device)
        on_device = [tensor for tensor in tensors if self._is_on_device(tensor)]
        self._clones = deque(tensor.clone() for tensor in tensors if not self._is_on_device(tensor))
        chunks: deque[Chunk] = deque()
        if on_device:
            copy = DeviceToHost(chunks, map(_range_of, on_device), frees=False)
            Transfer(device, self._arena, [copy], []).run()
        # The ranges would hold the storages on the device.
        self._blocks = deque((chunk.block, deque(chunk.pairs()[0])) for chunk in chunks)
        held_memory.report(self, Snapshot._held)

    def _held(self) -> dict[str, int]:
        blocks = sum(block.nbytes for block, _ in list(self._blocks) if block is not None)
        return {f"a save in the background (of the host memory for {self._device.name})": blocks}

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the bytes that ``tensor`` had, as uint8 tensors.

        Each tensor is read once, in the order in which they were given; the memory of what was read is free again.
        """
        if not self._is_on_device(tensor):
            yield from host_pieces(self._clones.popleft())
            return
        missing = tensor.nbytes
        while missing:
            block, views = self._blocks[0]
            missing -= views[0].numel()
            yield views.popleft()
            if not views:
                self._blocks.popleft()
                self._give(block)

    def release(self) -> None:
        """Free the memory of what was not read."""
        while self._blocks:
            self._give(self._blocks.popleft()[0])

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device == self._device.torch_device and tensor.nbytes > 0

    def _give(self, block: HostBlock | None) -> None:
        assert block is not None
        self._arena.give(block)


def _range_of(tensor: Tensor) -> StorageRange:
    storage = tensor.untyped_storage()
    return StorageRange(storage, storage.nbytes(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)
