"""CPGD (Liu et al. 2025, arXiv 2505.12504): the policy gradient, stopped at a bound, with a pull back to the old
policy. With d = logprob - old_logprob and r = e^d:

    value = -A clip(logprob) + drift_coef min(r - 1, 2) logprob
    clip(x) = min(x, old_logprob + ln(1 + clip_high)) if A > 0, else max(x, old_logprob + ln(1 - clip_low))

No gradient flows through min(r - 1, 2), so that the drift's gradient is that of KL(old || new), bounded.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed
from rlcore.kernels.losses.ratio import bounded, check_clip, ratio_statistics, stopped_statistics
from rlcore.kernels.operands import check_finite

_MOST_DRIFT = 2.0  # of r - 1, as in the authors' recipe in siiRL and LightRFT


@takes("cpgd", clip_low=NUMBER, clip_high=NUMBER, drift_coef=NUMBER)
def cpgd(*, clip_low: float = 0.2, clip_high: float = 0.28, drift_coef: float = 0.0) -> LossFn:
    """Return the clipped policy gradient with drift; it reads ``old_logprobs`` and ``advantages``.

    Args:
        clip_low: in [0, 1]; a negative advantage acts until the ratio is below 1 - clip_low.
        clip_high: >= 0; a positive advantage acts until the ratio is above 1 + clip_high.
        drift_coef: finite, >= 0; strength of the pull back. siiRL's recipes take 0.001.

    Statistics: ``ratio_mean ratio_min ratio_max approx_kl_mean clip_low_mean clip_high_mean`` as ``ppo_clip``.
    """
    check_clip("cpgd", clip_low, clip_high)
    if not drift_coef >= 0:
        raise InvalidInputError(f"cpgd: drift_coef must be >= 0; got {drift_coef}")
    check_finite("cpgd: drift_coef", drift_coef)
    lowest, highest = math.log(1 - clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)

    def cpgd_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        advantage, old = needed(per_token, "advantages", "cpgd"), needed(per_token, "old_logprobs", "cpgd")
        log_ratio = logprob - old
        clipped = logprob.clamp(max=old + highest).where(advantage > 0, logprob.clamp(min=old + lowest))
        drift = bounded(log_ratio.detach()).expm1().clamp(max=_MOST_DRIFT)
        value = -advantage * clipped + drift_coef * drift * logprob
        stopped = stopped_statistics(log_ratio < lowest, log_ratio > highest, advantage)
        return value, ratio_statistics(bounded(log_ratio)) | stopped

    return cpgd_term
