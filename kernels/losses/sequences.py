"""Means over the tokens of a sequence, for sequence-level losses."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.kernels.losses.interface import PerToken, needed


def sequence_mean(values: Tensor, per_token: PerToken) -> Tensor:
    """Return [t]: at each token the mean of ``values`` [t] over the tokens of its sequence that count; 0 if none does.

    Differentiable. The values of tokens that do not count have no influence, NaN included.

    Raises:
        InvalidInputError: ``per_token`` without ``cu_seqlens`` or ``token_mask``, which ``linear_loss`` sets for
            losses marked ``@sequence_level``.
    """
    edges = needed(per_token, "cu_seqlens", "sequence_mean")
    mask_T = needed(per_token, "token_mask", "sequence_mean")
    length_N = edges.diff()
    sequence_N = torch.arange(len(length_N), device=values.device)
    sequence_T = sequence_N.repeat_interleave(length_N, output_size=len(values))

    def total(values_T: Tensor) -> Tensor:
        # index_put_ adds in a fixed order on every device, index_add_ does not
        return values_T.new_zeros(len(length_N)).index_put((sequence_T,), values_T, accumulate=True)

    mean_N = total(torch.where(mask_T, values, 0.0)) / total(mask_T.to(values.dtype)).clamp(min=1)
    return mean_N[sequence_T]
