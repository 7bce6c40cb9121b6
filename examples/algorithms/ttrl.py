"""TTRL (arXiv:2504.16084): no answer is known; the one that most samples agree on is taken for right.

As in the paper, it trains on the problems of the test. Votes raise the share of right answers among sampled ones: they
make the majority's likelier.
"""

from collections import Counter

import torch

from rlcore.examples.algorithms.loop import Algorithm, Rollout, Run, main
from rlcore.quickstart import task


class TTRL(Algorithm):
    """Test-time reinforcement learning by majority vote."""

    # Votes must be right for nearly all problems, and the rate low: else wrong answers spread (docs/migrating.md).
    imitation, samples, rate = 250, 16, 3e-5
    temperature = 1.0

    def teacher(self, run: Run, problems: list[task.Problem]) -> list[str]:
        """Return right answers, which are imitated until nearly all votes are right.

        A vote finds the right answer where mistakes differ. Pupils of the teacher that forgets carries make the same.
        """
        return [task.answer_text(problem) for problem in problems]

    def begin(self, run: Run) -> None:
        """Take the problems that are scored for those to train on: their answers are not used."""
        run.training = run.held_out

    def rollout(self, run: Run) -> Rollout:
        sampled = run.sample(run.num_problems)
        votes = [majority_rewards([answer.text for answer in output.outputs]) for output in sampled.outputs]
        return Rollout(sampled.problems, sampled.outputs, torch.tensor(votes))


def majority_rewards(answers: list[str]) -> list[float]:
    """Return 1 for each answer that is the most frequent one, the first of several, else 0."""
    [(elected, _)] = Counter(answers).most_common(1)
    return [float(answer == elected) for answer in answers]


if __name__ == "__main__":
    main(TTRL())
