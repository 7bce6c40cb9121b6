"""``torch.npu``, which is there once torch_npu was loaded."""

from __future__ import annotations

from typing import Any

import torch


def npu() -> Any:
    """Raises RuntimeError where torch has no such device type."""
    return torch.get_device_module("npu")
