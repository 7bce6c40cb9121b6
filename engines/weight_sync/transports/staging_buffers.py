"""The two staging buffers of a sender, called slots, through which its buckets go, each with its header."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlcore import held_memory
from rlcore.device import Device
from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT, Bucket
from rlcore.engines.weight_sync.planning.manifest import dtype_of
from rlcore.engines.weight_sync.transports.exports import Exports
from rlcore.errors import DeviceError, InvalidInputError
from rlcore.registry import get_device
from rlcore.types import IpcHandle

NUM_SLOTS = 2


class StagingBuffers:
    """Two slots in one allocation of a sender, and two more in shared memory of the host if receivers open those.

    Args:
        slot_bytes: size of each slot; see ``check_slot_bytes``.

    Raises:
        DeviceError: the device, or the host, has too little memory.
    """

    def __init__(self, device: Device, slot_bytes: int, *, is_on_host: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.is_on_host = is_on_host
        self._memory = _allocated(device, slot_bytes)
        self._owner = host_device() if is_on_host else device
        self._shared = _allocated(self._owner, slot_bytes) if is_on_host else self._memory
        self._exports = Exports(self._owner)
        self._handle: IpcHandle | None = None
        held_memory.report(self, StagingBuffers._held)

    def _held(self) -> dict[str, int]:
        held = {f"staging buffers of weight syncs on {self._memory.device}": self._memory.nbytes}
        if self.is_on_host:
            held["staging buffers of weight syncs, on the host"] = self._shared.nbytes
        return held

    @property
    def handle(self) -> IpcHandle:
        """The handle by which receivers open both slots; the same until ``close``.

        Raises:
            DeviceError, UnsupportedError: the memory cannot be shared; says why.
        """
        if self._handle is None:
            self._handle = self._owner.memory.export_ipc(self._shared)
            self._exports.add([self._handle])
        return self._handle

    def slot(self, number: int) -> Tensor:
        """Return the slot to be packed, [slot_bytes] uint8 on the device."""
        return slot_of(self._memory, number)

    def show(self, number: int, nbytes: int) -> None:
        """Let receivers see the first ``nbytes`` of a slot, once the device has written them."""
        if self.is_on_host:
            slot_of(self._shared, number)[:nbytes].copy_(self.slot(number)[:nbytes])

    def close(self, timeout_s: float) -> None:
        """Take the memory back; raises StateError when a receiver does not let go, and can be called again then."""
        self._handle = None
        self._exports.take_back(timeout_s)


def host_device() -> Any:
    """Return the device whose memory every process of a machine can open."""
    return get_device("cpu")


def _allocated(device: Device, slot_bytes: int) -> Tensor:
    try:
        return torch.empty(NUM_SLOTS * slot_bytes, dtype=torch.uint8, device=device.torch_device)
    except RuntimeError as error:
        raise DeviceError(
            f"{device.name} has no memory for {NUM_SLOTS} staging buffers of {slot_bytes} bytes; give a smaller "
            "staging_bytes"
        ) from error


def slot_of(memory: Tensor, number: int) -> Tensor:
    """Return a slot of the memory of both, [slot_bytes] uint8."""
    return memory.view(NUM_SLOTS, -1)[number]


def views(slot: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """Return the slot in each dtype of the bucket's pieces, by the dtype's name."""
    return {dtype: slot.view(dtype_of(dtype)) for dtype in bucket.dtypes}


def check_slot_bytes(slot_bytes: int) -> None:
    """Raise InvalidInputError for a size that staging buffers cannot have."""
    if type(slot_bytes) is not int or slot_bytes < 2 * ALIGNMENT or slot_bytes % ALIGNMENT:
        raise InvalidInputError(
            f"a staging buffer must be a multiple of {ALIGNMENT} bytes and at least {2 * ALIGNMENT}, got {slot_bytes!r}"
        )
