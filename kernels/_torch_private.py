"""The private names of torch that kernels need; see ``rlcore/_torch_private.py``."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_on_device(ok: Tensor, message: str) -> None:
    """Let the device stop with ``message`` if a bool scalar is False there; the host does not wait for it.

    There is no public function for it. Since torch 2.10.
    """
    torch._assert_async(ok, message)
