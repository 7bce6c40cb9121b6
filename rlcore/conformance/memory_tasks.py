"""What the other process does in tests of memory."""

from __future__ import annotations

from typing import Any

import torch

from rlcore.conformance.work import filled

_held: list[torch.Tensor] = []


def hold(device: Any, num_bytes: int) -> None:
    """Hold so much device memory, instead of what was held before."""
    _held.clear()
    device.memory.empty_cache()
    _held.append(filled(device, num_bytes))
    device.synchronize()
