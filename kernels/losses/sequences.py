"""Means and sums over the tokens of a sequence, for sequence-level losses."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.kernels.losses.interface import PerToken, needed
from rlcore.kernels.softmax_rows import wide_dtype


def sequence_mean(values: Tensor, per_token: PerToken) -> Tensor:
    """Return [t]: at each token the mean of ``values`` [t] over the tokens of its sequence that count; 0 if none does.

    Differentiable, and in float32 at least: sums in 16 bits stop growing after some hundred tokens. The values of
    tokens that do not count have no influence, NaN included.

    Raises:
        InvalidInputError: ``per_token`` without ``cu_seqlens`` or ``token_mask``, which ``linear_loss`` sets for
            losses marked ``@sequence_level``.
    """
    total, sequence_T, mask_T = _totals(values, per_token, "sequence_mean")
    counts_N, _, _ = _totals(mask_T.to(total.dtype), per_token, "sequence_mean")
    return (total / counts_N.clamp(min=1))[sequence_T]


def sequence_sum(values: Tensor, per_token: PerToken) -> Tensor:
    """Return [t]: at each token the sum of ``values`` [t], as ``sequence_mean`` the mean."""
    total, sequence_T, _ = _totals(values, per_token, "sequence_sum")
    return total[sequence_T]


def _totals(values_T: Tensor, per_token: PerToken, what: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of each sequence [n], the number of each token's sequence [t], and the mask [t]."""
    values_T = values_T.to(wide_dtype(values_T.dtype))
    edges = needed(per_token, "cu_seqlens", what)
    mask_T = needed(per_token, "token_mask", what)
    length_N = edges.diff()
    sequence_N = torch.arange(len(length_N), device=values_T.device)
    sequence_T = sequence_N.repeat_interleave(length_N, output_size=len(values_T))
    # index_put_ adds in a fixed order on every device, index_add_ does not
    none_N = values_T.new_zeros(len(length_N))
    return none_N.index_put((sequence_T,), torch.where(mask_T, values_T, 0.0), accumulate=True), sequence_T, mask_T
