"""Dr. GRPO (arXiv:2503.20783): GRPO without the two biases, by a group's deviation and by an answer's length."""

from rlcore.examples.algorithms.loop import Algorithm, Batch, Rollout, Run, main
from rlcore.ops import group_advantage


class DrGRPO(Algorithm):
    """GRPO done right."""

    token_weights = "seq-mean-token-sum-norm"

    def begin(self, run: Run) -> None:
        self.max_length = run.max_tokens  # a constant, by which every sequence's sum is divided

    def prepare(self, run: Run, rollout: Rollout, batch: Batch) -> None:
        batch["advantages"] = group_advantage(rollout.rewards, mode="dr_grpo").flatten()


if __name__ == "__main__":
    main(DrGRPO())
