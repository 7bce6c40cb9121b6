"""GRPO (arXiv:2402.03300): a group's mean as the baseline, and the divergence from a reference in the loss."""

from rlcore.examples.algorithms.loop import Algorithm, Batch, Rollout, Run, main, reference_of
from rlcore.ops import LossFn, combine, kl, ppo_clip


class GRPO(Algorithm):
    """Group relative policy optimization."""

    def begin(self, run: Run) -> None:
        self.reference = reference_of(run)

    def loss_fn(self) -> LossFn:
        return combine(ppo_clip(clip_high=0.2), kl(kind="k3", coef=0.001))

    def prepare(self, run: Run, rollout: Rollout, batch: Batch) -> None:
        super().prepare(run, rollout, batch)
        batch["ref_logprobs"] = self.reference.forward_logprobs(batch, temperature=self.temperature)


if __name__ == "__main__":
    main(GRPO())
