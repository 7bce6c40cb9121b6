"""RLOO (arXiv:2402.14740): REINFORCE with the mean of a problem's other answers as the baseline, one step a batch."""

from rlcore.examples.algorithms.loop import Algorithm, Batch, Rollout, Run, main
from rlcore.ops import LossFn, group_advantage, reinforce


class RLOO(Algorithm):
    """REINFORCE leave-one-out."""

    token_weights = "seq-mean-token-sum"
    num_minibatches = 1  # it has no ratio: the policy that learns must be the one that sampled

    def loss_fn(self) -> LossFn:
        return reinforce()

    def prepare(self, run: Run, rollout: Rollout, batch: Batch) -> None:
        batch["advantages"] = group_advantage(rollout.rewards, mode="rloo").flatten()


if __name__ == "__main__":
    main(RLOO())
