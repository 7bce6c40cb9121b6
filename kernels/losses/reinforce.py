"""REINFORCE (Williams 1992), and CISPO: REINFORCE weighted by a ratio through which no gradient flows.

    reinforce        value = -A logprob
    cispo            value = -clip(r, 1 - clip_low, 1 + clip_high) A logprob
    cispo_absolute   value = -min(r, max_ratio) A logprob

with r = exp(logprob - old_logprob) detached, so that clipped tokens still learn. CISPO is MiniMax-M1's (arXiv
2506.13585); peers disagree about what its bound is measured from: 1 (verl, slime, NeMo-RL: ``cispo``) or 0 (TRL,
Liger: ``cispo_absolute``, where ``epsilon_high=5`` means a ratio of 5).
"""

from __future__ import annotations

import math

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed
from rlcore.kernels.losses.ratio import check_clip, log_ratio_to_old, ratio_statistics


def reinforce() -> LossFn:
    """Return the policy gradient itself; it reads ``advantages``. Weight it with ``tis`` or ``icepop``."""

    def reinforce_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        return -needed(per_token, "advantages", "reinforce") * logprob, {}

    return reinforce_term


@takes("cispo", clip_low=NUMBER, clip_high=NUMBER)
def cispo(*, clip_low: float = 0.2, clip_high: float = 0.28) -> LossFn:
    """Return CISPO with bounds measured from 1; it reads ``old_logprobs`` and ``advantages``.

    Args:
        clip_low: in [0, 1]; the weight is at least 1 - clip_low. 1 leaves it unbounded from below.
        clip_high: >= 0; the weight is at most 1 + clip_high.

    Statistics: ``ratio_mean ratio_min ratio_max approx_kl_mean`` as ``ppo_clip``; ``clip_low_mean
    clip_high_mean``, the share of tokens whose weight was clipped, whatever their advantage.
    """
    check_clip("cispo", clip_low, clip_high)
    return _bounded_weight("cispo", 1 - clip_low, 1 + clip_high)


@takes("cispo_absolute", max_ratio=NUMBER)
def cispo_absolute(*, max_ratio: float = 5.0) -> LossFn:
    """Return CISPO with one bound of the ratio itself; it reads ``old_logprobs`` and ``advantages``.

    Args:
        max_ratio: >= 1; the weight is at most this.

    Statistics: as ``cispo``.
    """
    if not max_ratio >= 1:
        raise InvalidInputError(
            f"cispo_absolute: max_ratio must be >= 1, a bound of the ratio itself; got {max_ratio}. "
            "cispo(clip_high=...) is measured from 1"
        )
    return _bounded_weight("cispo_absolute", -math.inf, max_ratio)


def _bounded_weight(loss: str, lowest: float, highest: float) -> LossFn:
    def cispo_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        log_ratio = log_ratio_to_old(logprob, per_token, loss).detach()
        ratio = log_ratio.exp()
        value = -ratio.clamp(lowest, highest) * needed(per_token, "advantages", loss) * logprob
        stats = {"clip_low_mean": ratio < lowest, "clip_high_mean": ratio > highest}
        return value, ratio_statistics(log_ratio) | stats

    return cispo_term
