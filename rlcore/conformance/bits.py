"""Tensors of any bits, which only a copy leaves as they are."""

from __future__ import annotations

import math

import torch


def any_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values in host memory that no other dtype holds, from 3 values on NaN and both infinities among them."""
    if dtype == torch.bool:  # whose other bits are no value
        return torch.randint(2, (numel,), dtype=torch.uint8).to(torch.bool)
    values = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point and numel >= 3:
        values[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    return values


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
