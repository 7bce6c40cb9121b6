"""The private names of torch that kernels need; see ``rlcore/_torch_private.py``."""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def assert_on_device(ok: Tensor, message: str) -> None:
    """Let the device stop with ``message`` if a bool scalar is False there; the host does not wait for it.

    There is no public function for it. Since torch 2.10.
    """
    torch._assert_async(ok, message)


def is_compiler_loaded() -> bool:
    """Return True in compiled code, and wherever torch's compiler may look at what runs; asking does not load it.

    Loading it takes longer than loading torch. No public function says whether it is there. Since torch 2.10.
    """
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules
