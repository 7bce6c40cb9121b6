"""OPSM, off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): it leaves out bad sequences that have become
unlikely. With the n tokens of a sequence that count, a token has no loss if

    A < 0  and  sum_t (old_logprob_t - logprob_t) / n > max_kl

without gradient. slime (``compute_opsm_mask`` in slime/utils/ppo_utils.py) takes the distance to ``old_logprobs``; TRL
(``get_off_policy_mask`` in trl/trainer/grpo_trainer.py) to the sampler's log-probabilities.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import (
    LOSS,
    LossFn,
    PerToken,
    TermOutput,
    joined_statistics,
    needed,
    sequence_level,
)
from rlcore.kernels.losses.sequences import sequence_mean

ANCHORS = ("old_logprobs", "rollout_logprobs")


@takes("opsm", term=LOSS, max_kl=NUMBER)
def opsm(
    term: LossFn, *, max_kl: float, anchor: Literal["old_logprobs", "rollout_logprobs"] = "old_logprobs"
) -> LossFn:
    """Return ``term`` without the tokens of negative advantage in sequences beyond ``max_kl``; sequence level.

    It reads ``advantages`` and the ``anchor`` too. Token weights still count the tokens that are left out.

    Args:
        term: a loss term.
        max_kl: >= 0; the largest mean of ``anchor - logprob`` over a sequence, in nats, such as 1e-4.
        anchor: the entry that the distance is taken to.

    Statistics: the term's, ``opsm_kl_mean opsm_kl_max`` of the mean distance, and ``opsm_cut_mean``.
    """
    if not max_kl >= 0:
        raise InvalidInputError(f"opsm: max_kl must be >= 0; got {max_kl}")
    if anchor not in ANCHORS:
        raise InvalidInputError(f"opsm: anchor must be one of {', '.join(ANCHORS)}; got {anchor!r}")

    def masked_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        value, stats = term(logprob, entropy, per_token)
        distance = sequence_mean(needed(per_token, anchor, "opsm") - logprob.detach(), per_token)
        is_cut = (needed(per_token, "advantages", "opsm") < 0) & (distance > max_kl)
        new = {"opsm_kl_mean": distance, "opsm_kl_max": distance, "opsm_cut_mean": is_cut}
        return value.where(~is_cut, 0.0), joined_statistics(stats, new, "opsm")

    return sequence_level(masked_term)
