"""Terms on policy: on the first step over a batch the old policy is the one that is trained.

    old_logprobs = logprob, without gradient

so that every ratio is 1 and its gradient is that of the log-probability. It saves the pass that would compute
``old_logprobs``, as TRL's GRPOTrainer does when it takes one step a batch.
"""

from __future__ import annotations

from torch import Tensor

from rlcore.arguments import takes
from rlcore.kernels.losses.interface import LOSS, LossFn, PerToken, TermOutput, as_level_of


@takes("on_policy", term=LOSS)
def on_policy(term: LossFn) -> LossFn:
    """Return ``term`` with the policy itself, without gradient, as the old one; ``old_logprobs`` are not read.

    It serves every term that reads them: ``on_policy(ppo_clip())``, ``on_policy(gspo())``. Importance weights of
    samplers stay outside or inside: ``on_policy(tis(ppo_clip()))`` weighs by the ratio to ``rollout_logprobs``.

    Args:
        term: a loss term, or several combined.

    Statistics: the term's.
    """

    def on_policy_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        return term(logprob, entropy, {**per_token, "old_logprobs": logprob.detach()})

    return as_level_of(on_policy_term, term)
