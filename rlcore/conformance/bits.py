"""Tensors of any bits, which only a copy leaves as they are."""

from __future__ import annotations

import torch


def any_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values in host memory that no other dtype holds, NaN and infinity among them."""
    if dtype == torch.bool:  # whose other bits are no value
        return torch.randint(2, (numel,), dtype=torch.uint8).to(torch.bool)
    return torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
