"""REINFORCE++ (arXiv:2501.03262): no critic and no groups; rewards of tokens with the divergence in them, whitened."""

import torch
from torch import Tensor

from rlcore.examples.algorithms.loop import Algorithm, Batch, Rollout, Run, main, reference_of
from rlcore.ops import discounted_return, masked_whiten


class ReinforcePlusPlus(Algorithm):
    """REINFORCE with the clip of PPO and whitened returns."""

    token_weights = "token-mean"
    kl_coef = 0.001

    def begin(self, run: Run) -> None:
        self.reference = reference_of(run)

    def prepare(self, run: Run, rollout: Rollout, batch: Batch) -> None:
        reference_NL = self.reference.forward_logprobs(batch, temperature=self.temperature)
        divergence_NL = batch["old_logprobs"] - reference_NL
        rewards_NL = token_rewards(rollout.rewards.flatten(), batch["loss_mask"]) - self.kl_coef * divergence_NL
        returns_NL = discounted_return(rewards_NL, batch["loss_mask"])
        batch["advantages"] = masked_whiten(returns_NL, batch["loss_mask"])


def token_rewards(rewards_N: Tensor, mask_NL: Tensor) -> Tensor:
    """Return [N, L]: each sequence's reward at its last token that counts, 0 elsewhere."""
    last_NL = mask_NL & (mask_NL.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last_NL, rewards_N[:, None], 0.0)


if __name__ == "__main__":
    main(ReinforcePlusPlus())
