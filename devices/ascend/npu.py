"""Access to ``torch.npu``, which exists once torch_npu was loaded."""

from __future__ import annotations

from typing import Any

import torch


def npu() -> Any:
    """Return the module. Raises RuntimeError where torch has no such device type."""
    return torch.get_device_module("npu")
