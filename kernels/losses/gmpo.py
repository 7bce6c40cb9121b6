"""GMPO (Zhao et al. 2025, arXiv 2507.20673): the geometric mean of clipped token ratios.

With d_t = logprob_t - old_logprob_t of the n tokens of a sequence that count, clipped where their advantage would
drive them further (in the logarithm, unlike PPO), on each of its tokens:

    c_t = min(d_t, clip_high) if A_t > 0, max(d_t, -clip_low) if A_t < 0, 0 if A_t = 0
    value = -mean(A) exp(sum_t c_t / n)
"""

from __future__ import annotations

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed, sequence_level
from rlcore.kernels.losses.ratio import bounded, ratio_statistics, stopped_statistics
from rlcore.kernels.losses.sequences import sequence_mean


@takes("gmpo", clip_low=NUMBER, clip_high=NUMBER)
def gmpo(*, clip_low: float = 0.4, clip_high: float = 0.4) -> LossFn:
    """Return the geometric-mean surrogate; sequence level. It reads ``old_logprobs`` and ``advantages``.

    Args:
        clip_low: >= 0; a token's log-ratio may fall to -clip_low. Both defaults are the paper's.
        clip_high: >= 0; a token's log-ratio may rise to clip_high.

    Statistics: as ``ppo_clip``; ratios are of sequences, clip shares of tokens.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise InvalidInputError(f"gmpo: {name} must be >= 0 (a bound of the log-ratio); got {value}")

    @sequence_level
    def gmpo_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        advantage = needed(per_token, "advantages", "gmpo")
        log_ratio = logprob - needed(per_token, "old_logprobs", "gmpo")
        falling = log_ratio.clamp(min=-clip_low).where(advantage < 0, 0.0)
        clipped = log_ratio.clamp(max=clip_high).where(advantage > 0, falling)
        sequence_log_ratio = bounded(sequence_mean(clipped, per_token))
        value = -sequence_mean(advantage, per_token) * sequence_log_ratio.exp()
        stopped = stopped_statistics(log_ratio < -clip_low, log_ratio > clip_high, advantage)
        return value, ratio_statistics(sequence_log_ratio) | stopped

    return gmpo_term
