"""The distribution that a sampler draws from, by its definition: sorted, in whatever dtype the logits have.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_APART = 1e-5
"""Of probability: a hundred roundings of float32. Nearer to the edge of a nucleus a token may be on either side."""


def restricted(logits_RV: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> Tensor:
    """Return the log-probabilities [R, V] after top-k, and then top-p of what top-k left; -inf for all others."""
    scaled_RV, order_RV = (logits_RV / temperature).sort(-1, descending=True)
    if top_k > 0:
        scaled_RV[:, top_k:] = -torch.inf
    if top_p < 1:
        probability_RV = scaled_RV.softmax(-1)
        reached_RV = probability_RV.cumsum(-1)
        assert (reached_RV - top_p).abs().min() > _APART, "a token is at the edge of the nucleus; take another seed"
        scaled_RV = scaled_RV.masked_fill(reached_RV - probability_RV >= top_p, -torch.inf)
    return torch.empty_like(scaled_RV).scatter_(-1, order_RV, scaled_RV.log_softmax(-1))
