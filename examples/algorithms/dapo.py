"""DAPO (arXiv:2503.14476): clip-higher, dynamic sampling, a loss of tokens, and a penalty on overlong answers."""

import torch
from torch import Tensor

from rlcore.examples.algorithms.loop import Algorithm, Rollout, Run, main
from rlcore.ops import LossFn, ppo_clip


class DAPO(Algorithm):
    """Decoupled clip and dynamic sampling."""

    token_weights = "token-mean"
    extra_tokens = 4
    most_rounds = 8
    """So often problems are drawn for one step; after that it trains on what there is."""

    def loss_fn(self) -> LossFn:
        return ppo_clip(clip_low=0.2, clip_high=0.28)

    def rollout(self, run: Run) -> Rollout:
        """Draw problems until enough have both right and wrong answers: the others have no gradient."""
        drawn = run.sample(run.num_problems)
        found = drawn.rows(mixed(drawn.rewards))
        for _ in range(self.most_rounds - 1):
            if len(found.problems) >= run.num_problems:
                break
            drawn = run.sample(run.num_problems)
            more = drawn.rows(mixed(drawn.rewards))
            found = Rollout(
                found.problems + more.problems, found.outputs + more.outputs, torch.cat([found.rewards, more.rewards])
            )
        if not found.problems:
            found = drawn  # none has both; its step changes nothing
        found = found.rows(list(range(min(run.num_problems, len(found.problems)))))
        penalty = overlong_penalty(found.lengths, max_tokens=run.max_tokens, buffer=self.extra_tokens)
        return Rollout(found.problems, found.outputs, found.rewards + penalty)


def mixed(rewards: Tensor) -> list[int]:
    """Return the rows that have different rewards."""
    return [row for row, answers in enumerate(rewards.tolist()) if len(set(answers)) > 1]


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Return 0 up to ``max_tokens - buffer`` tokens, from there a line down to -1 at ``max_tokens``."""
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)


if __name__ == "__main__":
    main(DAPO())
