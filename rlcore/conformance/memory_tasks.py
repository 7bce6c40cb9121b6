"""Functions that the other process runs in tests of memory."""

from __future__ import annotations

import torch

from rlcore.conformance.work import filled
from rlcore.device import Device

_held: list[torch.Tensor] = []


def hold(device: Device, num_bytes: int) -> None:
    """Hold ``num_bytes`` of device memory, and free the memory of an earlier call."""
    _held.clear()
    device.memory.empty_cache()
    _held.append(filled(device, num_bytes))
    device.synchronize()


def allocated(device: Device) -> int:
    device.synchronize()
    return int(device.memory.stats().allocated_bytes)
