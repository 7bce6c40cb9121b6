"""GRPO on the tokens of high entropy alone (arXiv:2506.01939): those at which an answer takes one way or another."""

from typing import Any

import torch
from torch import Tensor

from rlcore.examples.algorithms.loop import Algorithm, Batch, Rollout, Run, main
from rlcore.ops import token_logprob
from rlcore.quickstart.policy import PolicyMethods


class Entropies(PolicyMethods):
    """The policy's own methods, and one that looks at its distributions."""

    @torch.no_grad()
    def entropies(self, input_ids: Tensor, attention_mask: Tensor, temperature: float) -> Tensor:
        """Return [N, L] on the host: the entropy of the distribution of each token, 0 at the first."""
        device: Any = self.device
        input_ids = input_ids.to(device)
        logits = self(input_ids, attention_mask.to(device)).logits[:, :-1]
        scores = token_logprob(
            logits.flatten(0, 1), input_ids[:, 1:].flatten(), temperature=temperature, with_entropy=True
        )
        assert scores.entropy is not None
        return torch.nn.functional.pad(scores.entropy.view(len(input_ids), -1), (1, 0)).cpu()


class HighEntropy(Algorithm):
    """GRPO that trains on a share of the tokens."""

    policy = Entropies
    token_weights = "token-mean"
    share = 0.2

    def prepare(self, run: Run, rollout: Rollout, batch: Batch) -> None:
        super().prepare(run, rollout, batch)
        [entropy_NL] = run.train.entropies(batch["input_ids"], batch["attention_mask"], self.temperature)
        batch["loss_mask"] = high_entropy_mask(entropy_NL, batch["loss_mask"], share=self.share)


def high_entropy_mask(entropy_NL: Tensor, mask_NL: Tensor, *, share: float) -> Tensor:
    """Return the part of a mask with this share of its tokens, those of the highest entropy; one at least."""
    inside = entropy_NL[mask_NL]
    count = max(1, round(share * len(inside)))
    return mask_NL & (entropy_NL >= inside.topk(count).values[-1])


if __name__ == "__main__":
    main(HighEntropy())
