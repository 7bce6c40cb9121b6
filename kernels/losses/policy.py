"""Policy-gradient terms.

PPO clip (Schulman et al. 2017, arXiv 1707.06347), with r = exp(logprob - old_logprob), A the advantage:

    value = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
    dual clip (Ye et al. 2019, arXiv 1912.09729): where A < 0, value = min(value, -dual_clip A)

GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783) and DAPO (2503.14476) are this term with other advantages and
token weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, needed

# e^20 is far outside any clip range; beyond e^88 the gradient of a clipped token would be 0 * inf.
_LOG_RATIO_LIMIT = 20.0


def ppo_clip(*, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None) -> LossFn:
    """The clipped surrogate; reads ``old_logprobs`` and ``advantages``.

    Args:
        clip_low: in [0, 1]; the ratio may fall to 1 - clip_low.
        clip_high: >= 0; the ratio may rise to 1 + clip_high.
        dual_clip: > 1; bounds the loss of negative advantages by ``dual_clip * |A|``. None leaves it
            unbounded.

    Statistics: ``ratio_mean ratio_min ratio_max``, ``approx_kl_mean`` (r - 1 - ln r, which estimates
    KL(old || new)), ``clip_low_mean clip_high_mean`` (share of tokens that a bound stopped),
    ``dual_clip_mean``.
    """
    if not 0 <= clip_low <= 1:
        raise InvalidInputError(f"ppo_clip: clip_low must be in [0, 1]; got {clip_low}")
    if not clip_high >= 0:
        raise InvalidInputError(f"ppo_clip: clip_high must be >= 0; got {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise InvalidInputError(f"ppo_clip: dual_clip must be > 1, or None; got {dual_clip}")

    def ppo_clip_term(
        logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = needed(per_token, "advantages", "ppo_clip")
        log_ratio = logprob - needed(per_token, "old_logprobs", "ppo_clip")
        log_ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        value = torch.maximum(-ratio * advantage, -clipped * advantage)
        stats = {
            "ratio_mean": ratio,
            "ratio_min": ratio,
            "ratio_max": ratio,
            "approx_kl_mean": ratio - 1 - log_ratio,
            "clip_low_mean": (advantage < 0) & (ratio < 1 - clip_low),
            "clip_high_mean": (advantage > 0) & (ratio > 1 + clip_high),
        }
        if dual_clip is not None:
            stats["dual_clip_mean"] = (advantage < 0) & (ratio > dual_clip)
            bound = torch.where(advantage < 0, -dual_clip * advantage, torch.inf)
            value = torch.minimum(value, bound)
        return value, stats

    return ppo_clip_term
