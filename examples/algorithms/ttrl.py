"""TTRL (arXiv:2504.16084): no answer is known; the one that most samples agree on is taken for right."""

from collections import Counter

import torch

from rlcore.examples.algorithms.loop import Algorithm, Rollout, Run, main

LABELLED_STEPS = 10


class TTRL(Algorithm):
    """Test-time reinforcement learning by majority vote."""

    has_votes = False

    def begin(self, run: Run) -> None:
        """Take some steps with known answers: the vote only helps where most samples agree on right ones.

        The teacher of the warm-start forgets carries, and so do most samples of its pupil.
        """
        for _ in range(LABELLED_STEPS):
            run.step()
        self.has_votes = True

    def rollout(self, run: Run) -> Rollout:
        if not self.has_votes:
            return super().rollout(run)
        sampled = run.sample(run.num_problems)
        votes = [majority_rewards([answer.text for answer in output.outputs]) for output in sampled.outputs]
        return Rollout(sampled.problems, sampled.outputs, torch.tensor(votes))


def majority_rewards(answers: list[str]) -> list[float]:
    """Return 1 for each answer that is the most frequent one, the first of several, else 0."""
    [(elected, _)] = Counter(answers).most_common(1)
    return [float(answer == elected) for answer in answers]


if __name__ == "__main__":
    main(TTRL())
