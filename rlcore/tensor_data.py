"""The plain form of a tensor for messages, files and errors: the name of its dtype, and its bytes."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a name such as "bfloat16"; ``getattr(torch, name)`` is the dtype."""
    return str(dtype).removeprefix("torch.")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy; the caller keeps the tensor alive.

    This avoids numpy: torch cannot free, and so not offload, a storage that numpy has referred to.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, [nbytes] uint8; they share its memory if it is contiguous.

    ``view(-1)`` would keep the stride of a tensor of one element, such as ``logits[:, 0]`` of a single row, and torch
    views only a stride of 1 as another dtype.
    """
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
