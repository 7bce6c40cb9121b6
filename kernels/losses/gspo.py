"""GSPO (Zheng et al. 2025, arXiv 2507.18071): PPO clip of a ratio of sequences.

With d_t = logprob_t - old_logprob_t of the n tokens of a sequence that count, on each of its tokens:

    s = exp(sum_t d_t / n)      value_t = max(-s A_t, -clip(s, 1 - clip_low, 1 + clip_high) A_t)

In the token form s_t has the value of s and the gradient of exp(d_t), so that each token's gradient goes with its
own advantage. With one advantage for all tokens of a sequence both forms have the same gradient, and with the
weights "seq-mean-token-mean" it is the paper's.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed, sequence_level
from rlcore.kernels.losses.policy import clipped_surrogate
from rlcore.kernels.losses.ratio import bounded, check_clip
from rlcore.kernels.losses.sequences import sequence_mean

FORMS = ("sequence", "token")


@takes("gspo", clip_low=NUMBER, clip_high=NUMBER)
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, form: Literal["sequence", "token"] = "sequence") -> LossFn:
    """Return the clipped surrogate of the sequence ratio; sequence level.

    It reads ``old_logprobs`` and ``advantages``.

    Args:
        clip_low: in [0, 1]. Both defaults are the paper's: a mean over tokens moves little.
        clip_high: >= 0.
        form: see above.

    Statistics: as ``ppo_clip``, of the sequence ratio.
    """
    check_clip("gspo", clip_low, clip_high)
    if form not in FORMS:
        raise InvalidInputError(f"gspo: form must be one of {', '.join(FORMS)}; got {form!r}")

    @sequence_level
    def gspo_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        log_ratio = sequence_mean(logprob - needed(per_token, "old_logprobs", "gspo"), per_token)
        if form == "token":
            log_ratio = log_ratio.detach() + (logprob - logprob.detach())
        advantage = needed(per_token, "advantages", "gspo").where(per_token["token_mask"], 0.0)
        return clipped_surrogate(bounded(log_ratio), advantage, clip_low, clip_high)

    return gspo_term
