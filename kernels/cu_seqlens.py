"""``cu_seqlens``: where each packed sequence begins, then the end.

Letters: N sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.operands import check_values, is_whole


def check_edges(name: str, cu_seqlens: Tensor) -> None:
    """Check the form, not the values: those are for ``rising_edges``.

    Raises:
        InvalidInputError: no [N + 1] integers.
    """
    if cu_seqlens.dim() != 1 or not is_whole(cu_seqlens) or len(cu_seqlens) == 0:
        raise InvalidInputError(f"{name} must be [N + 1] integers; got {list(cu_seqlens.shape)} {cu_seqlens.dtype}")


def rising_edges(name: str, cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Return ``cu_seqlens`` as int64.

    Raises:
        InvalidInputError: not [N + 1] integers, or values that do not rise from 0, to ``num_tokens`` if that is given;
            values are checked as by ``check_values``.
    """
    check_edges(name, cu_seqlens)
    edges_N = cu_seqlens.to(torch.int64)
    is_rising = (edges_N.diff() >= 0).all() & (edges_N[0] == 0)
    end = ""
    if num_tokens is not None:
        is_rising, end = is_rising & (edges_N[-1] == num_tokens), f" to the {num_tokens} tokens"
    check_values(is_rising, lambda: f"{name} must rise from 0{end}; got {edges_N.tolist()}")
    return edges_N
