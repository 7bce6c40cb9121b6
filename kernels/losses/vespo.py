"""VESPO (Shen et al. 2026, arXiv 2602.10693): REINFORCE with a soft weight of the whole sequence's ratio.

With d_t = logprob_t - old_logprob_t of the tokens of a sequence that count, and k and lambda by the advantage's sign:

    W = exp(sum_t d_t)      phi(W) = W^k exp(lambda (1 - W))      value_t = -phi(W) A_t logprob_t

without gradient through phi. phi(1) = 1, and phi falls off on both sides; W is not normalised by length. d_t is clamped
to +-20 and the sum to [ln 1e-8, 20], as in TRL's ``GRPOTrainer.get_gamma_weights`` (trl/trainer/grpo_trainer.py).
"""

from __future__ import annotations

import math

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed, sequence_level
from rlcore.kernels.losses.ratio import LOG_RATIO_LIMIT, log_ratio_to_old, ratio_statistics
from rlcore.kernels.losses.sequences import sequence_sum
from rlcore.kernels.operands import check_positive

_LOWEST = math.log(1e-8)


@takes("vespo", k_positive=NUMBER, lambda_positive=NUMBER, k_negative=NUMBER, lambda_negative=NUMBER)
def vespo(
    *, k_positive: float = 2.0, lambda_positive: float = 3.0, k_negative: float = 3.0, lambda_negative: float = 2.0
) -> LossFn:
    """Return the softly weighted policy gradient; sequence level. It reads ``old_logprobs`` and ``advantages``.

    The paper takes the ratio to the sampler, so ``old_logprobs`` should be the sampler's.

    Args:
        k_positive: > 0; the power of the ratio where A >= 0. All defaults are TRL's.
        lambda_positive: > 0; the fall-off of large ratios where A >= 0.
        k_negative: > 0; the power where A < 0.
        lambda_negative: > 0; the fall-off where A < 0.

    Statistics: ``ratio_mean ratio_min ratio_max approx_kl_mean`` as ``ppo_clip``, of W; ``vespo_weight_mean`` of phi.
    """
    named = {"k_positive": k_positive, "lambda_positive": lambda_positive}
    for name, value in (named | {"k_negative": k_negative, "lambda_negative": lambda_negative}).items():
        check_positive(f"vespo: {name}", value)
    lowest, highest = _LOWEST, LOG_RATIO_LIMIT

    def vespo_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        advantage = needed(per_token, "advantages", "vespo")
        log_ratio = sequence_sum(log_ratio_to_old(logprob, per_token, "vespo").detach(), per_token)
        log_ratio = log_ratio.clamp(lowest, highest)
        is_negative = advantage < 0
        power = log_ratio.new_full(log_ratio.shape, k_positive).masked_fill(is_negative, k_negative)
        falloff = log_ratio.new_full(log_ratio.shape, lambda_positive).masked_fill(is_negative, lambda_negative)
        weight = (power * log_ratio - falloff * log_ratio.expm1()).exp()
        return -weight * advantage * logprob, ratio_statistics(log_ratio) | {"vespo_weight_mean": weight}

    return sequence_level(vespo_term)
