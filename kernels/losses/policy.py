"""PPO clip (Schulman et al. 2017, arXiv 1707.06347), with r = exp(logprob - old_logprob), A the advantage:

    value = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
    dual clip (Ye et al. 2019, arXiv 1912.09729): where A < 0, value = min(value, -dual_clip A)

The two-sided clip of INTELLECT-2 (arXiv 2505.07291; ``delta`` in TRL), -min(min(r, delta) A, clip(r) A), is the
dual clip with ``dual_clip = delta > 1 + clip_high``. GRPO (2402.03300), Dr. GRPO (2503.20783) and DAPO
(2503.14476) are this term with other advantages and token weights: see docs/losses.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.arguments import NUMBER, optional, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed
from rlcore.kernels.losses.ratio import check_clip, log_ratio_to_old, ratio_statistics, stopped_statistics


@takes("ppo_clip", clip_low=NUMBER, clip_high=NUMBER, dual_clip=optional(NUMBER))
def ppo_clip(*, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None) -> LossFn:
    """Return the clipped surrogate; it reads ``old_logprobs`` and ``advantages``.

    Args:
        clip_low: in [0, 1]; the ratio may fall to 1 - clip_low.
        clip_high: >= 0; the ratio may rise to 1 + clip_high.
        dual_clip: > 1; bounds the loss of negative advantages by ``dual_clip * |A|``. None leaves it
            unbounded.

    Statistics: ``ratio_mean ratio_min ratio_max``, ``approx_kl_mean`` (r - 1 - ln r, which estimates
    KL(old || new)), ``clip_low_mean clip_high_mean`` (share of tokens that a bound stopped),
    ``dual_clip_mean``.
    """
    check_clip("ppo_clip", clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise InvalidInputError(f"ppo_clip: dual_clip must be > 1, or None; got {dual_clip}")

    def ppo_clip_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        advantage = needed(per_token, "advantages", "ppo_clip")
        log_ratio = log_ratio_to_old(logprob, per_token, "ppo_clip")
        value, stats = clipped_surrogate(log_ratio, advantage, clip_low, clip_high)
        if dual_clip is not None:
            is_bounded = (advantage < 0) & (log_ratio.detach().exp() > dual_clip)
            value = (-dual_clip * advantage).where(is_bounded, value)
            stats["dual_clip_mean"] = is_bounded
        return value, stats

    return ppo_clip_term


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> TermOutput:
    ratio, lowest, highest = log_ratio.exp(), 1 - clip_low, 1 + clip_high
    stopped = stopped_statistics(ratio < lowest, ratio > highest, advantage)
    # The greater of the two is the clipped one where a bound stops the token; the backward of torch.maximum, which
    # splits a tie, takes five times as many kernels.
    is_stopped = stopped["clip_low_mean"] | stopped["clip_high_mean"]
    value = -advantage * torch.where(is_stopped, ratio.detach().clamp(lowest, highest), ratio)
    return value, ratio_statistics(log_ratio) | stopped
