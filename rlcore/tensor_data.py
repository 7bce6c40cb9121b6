"""What a tensor is in messages, files and errors: the name of its dtype, and its bytes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"; ``getattr(torch, name)`` is the dtype."""
    return str(dtype).removeprefix("torch.")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory, which the caller keeps alive meanwhile.

    Not through numpy: torch would never again free a storage that numpy has seen, and so not offload it.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
