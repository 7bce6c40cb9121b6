"""Reductions that a collective library does not have, of tensors that it has moved.

    parts_RN    R = ranks, N = elements: row r is that of rank r

The rows are reduced in order of rank in a wider dtype, and rounded once: every rank computes the same bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_METHODS = {"sum": "sum", "product": "prod", "min": "amin", "max": "amax"}
_BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def fold(parts_RN: Tensor, op: str) -> Tensor:
    """Return [N] of the same dtype. Integers wrap; their mean is rounded towards 0; the sum of bools is their "or"."""
    dtype = parts_RN.dtype
    if dtype == torch.uint64:
        return _fold_uint64(parts_RN, op)
    return _fold(parts_RN.to(_wider(dtype)), op).to(dtype)


def scaled(values: Tensor, factor: float) -> Tensor:
    """Return what each rank adds in a "premul_sum", rounded to the dtype of its values."""
    return (values.to(_wider(values.dtype)) * factor).to(values.dtype)


def _wider(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _fold(parts_RN: Tensor, op: str) -> Tensor:
    if op in _BITWISE:
        return functools.reduce(_BITWISE[op], parts_RN.unbind(0))
    if op == "avg":
        rounding = None if parts_RN.is_floating_point() or parts_RN.is_complex() else "trunc"
        return torch.div(parts_RN.sum(0), parts_RN.shape[0], rounding_mode=rounding)
    reduced: Tensor = getattr(parts_RN, _METHODS[op])(0)
    return reduced


def _fold_uint64(parts_RN: Tensor, op: str) -> Tensor:
    """Reduce as int64, whose sums, products and bits are the same, and whose order is, with the top bit flipped."""
    top = torch.iinfo(torch.int64).min if op in ("min", "max") else 0
    return (_fold(parts_RN.view(torch.int64) ^ top, op) ^ top).view(torch.uint64)
