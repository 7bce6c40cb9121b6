"""A function that the other process runs in tests of memory."""

from __future__ import annotations

from typing import Any

import torch

from rlcore.conformance.work import filled

_held: list[torch.Tensor] = []


def hold(device: Any, num_bytes: int) -> None:
    """Hold ``num_bytes`` of device memory, and free the memory of an earlier call."""
    _held.clear()
    device.memory.empty_cache()
    _held.append(filled(device, num_bytes))
    device.synchronize()
