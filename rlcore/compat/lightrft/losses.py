"""LightRFT's losses of padded actions, by rlcore's terms: the mean of each sequence, then of the batch.

Letters: N sequences, A actions.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.losses.penalty import KLKind
from rlcore.ops import cpgd, kl, ppo_clip


class PolicyLoss(nn.Module):
    """PPO's clipped loss, or CPGD's."""

    def __init__(
        self,
        clip_eps: float = 0.2,
        use_dapo: bool = False,
        use_cpg_loss: bool = False,
        high_entropy_token_ratio: float = 0.0,
        *,
        use_gspo: bool = False,
        use_gmpo: bool = False,
    ) -> None:
        super().__init__()
        if use_gspo or use_gmpo:
            raise UnsupportedError(
                f"PolicyLoss({'use_gspo' if use_gspo else 'use_gmpo'}=True)",
                "it has PPO's and CPGD's loss; rlcore.ops.gspo and rlcore.ops.gmpo are terms of linear_loss",
            )
        if use_dapo:
            raise UnsupportedError(
                "PolicyLoss(use_dapo=True)", "LightRFT ignores it; examples/algorithms/dapo.py has the whole algorithm"
            )
        self.high_entropy_token_ratio = high_entropy_token_ratio
        term = cpgd if use_cpg_loss else ppo_clip
        self._term = term(clip_low=clip_eps, clip_high=clip_eps)

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        entropy_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss over the tokens of ``entropy_mask``, or else of ``action_mask``; all are [N, A]."""
        if advantages.dim() != log_probs.dim():  # one value a row would be broadcast to one a column
            raise InvalidInputError(
                f"advantages must be [N, A] or [N, 1] for log_probs {list(log_probs.shape)}; got "
                f"{list(advantages.shape)}"
            )
        mask = action_mask if entropy_mask is None else entropy_mask
        if mask is not None:  # what stands at other tokens, NaN too, has no part in the gradient
            inputs = (log_probs, old_log_probs, advantages)
            log_probs, old_log_probs, advantages = (x.masked_fill(~mask.bool(), 0) for x in inputs)
        value_NA, _ = self._term(log_probs, None, {"old_logprobs": old_log_probs, "advantages": advantages})
        return masked_mean(value_NA, mask, dim=-1).mean()


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, action_mask: Tensor | None = None, kl_estimator: str = "k1"
) -> Tensor:
    """Return an estimate of the divergence from the base at each token, [N, A]."""
    log_ratio_NA = log_probs.float() - log_probs_base.float()
    if action_mask is not None:
        log_ratio_NA = _weighted(log_ratio_NA, action_mask)
    nothing = torch.zeros_like(log_ratio_NA)
    value_NA, _ = kl(kind=cast(KLKind, kl_estimator), coef=1.0)(log_ratio_NA, None, {"ref_logprobs": nothing})
    return value_NA


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Return the mean where the mask is, 0 where it is nowhere; numbers in a mask are weights, as in LightRFT's."""
    if mask is None:
        return tensor.mean(dim)
    total = mask.sum(dim)
    return _weighted(tensor, mask).sum(dim) / total.masked_fill(total == 0, 1)


def _weighted(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor * mask``, and 0 where the mask is 0: also of what is no number."""
    return torch.where(mask != 0, tensor, 0) * mask
