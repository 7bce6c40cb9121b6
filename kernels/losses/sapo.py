"""SAPO (Gao et al. 2025, arXiv 2511.20347): a smooth gate in the place of a clip. With r = exp(logprob -
old_logprob) and tau the temperature of the advantage's sign:

    value = -A (4 / tau) sigmoid(tau (r - 1))

whose gradient at r = 1 is -A, as PPO's, and falls off on both sides.
"""

from __future__ import annotations

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed
from rlcore.kernels.losses.ratio import log_ratio_to_old, ratio_statistics
from rlcore.kernels.operands import check_positive


@takes("sapo", temperature_positive=NUMBER, temperature_negative=NUMBER)
def sapo(*, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> LossFn:
    """Return the gated surrogate; it reads ``old_logprobs`` and ``advantages``.

    Args:
        temperature_positive: > 0; tau where A > 0. Higher lets a token move less. Both defaults are the paper's.
        temperature_negative: > 0; tau elsewhere.

    Statistics: ``ratio_mean ratio_min ratio_max approx_kl_mean`` as ``ppo_clip``.
    """
    check_positive("sapo: temperature_positive", temperature_positive)
    check_positive("sapo: temperature_negative", temperature_negative)

    def sapo_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        advantage = needed(per_token, "advantages", "sapo")
        log_ratio = log_ratio_to_old(logprob, per_token, "sapo")
        is_positive = advantage > 0
        tau = log_ratio.new_full(log_ratio.shape, temperature_negative).masked_fill(is_positive, temperature_positive)
        gate = (tau * (log_ratio.exp() - 1)).sigmoid() * 4 / tau
        return -advantage * gate, ratio_statistics(log_ratio)

    return sapo_term
