"""GRPO with a reward model: a third engine, the model with a head for scores, on the device when it is its turn.

First it learns from pairs of a right answer and the teacher's wrong one (Bradley-Terry). Then the policy learns from it
alone; the held-out score is the verifier's, which the policy never sees.
"""

from typing import Any

import torch
from torch import Tensor, nn

import rlcore
from rlcore.examples.algorithms.loop import Algorithm, Rollout, Run, main
from rlcore.nn import HuggingFaceTrainModule
from rlcore.quickstart import task

PAIRS, RATE = 128, 1e-3


class RewardModel(HuggingFaceTrainModule):
    """Mixed into the model's class: a score of each sequence, read at its last token."""

    new_parameters = ("score_head",)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score_head = nn.Linear(config.hidden_size, 1)

    def on_weights_materialized(self) -> None:
        nn.init.zeros_(self.score_head.weight)
        nn.init.zeros_(self.score_head.bias)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)

    def scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_NLH = self.get_decoder()(input_ids, attention_mask).last_hidden_state  # type: ignore[operator]
        last_N = attention_mask.long().sum(1) - 1
        score_N: Tensor = self.score_head(hidden_NLH[torch.arange(len(last_N)), last_N]).squeeze(-1)
        return score_N

    @torch.no_grad()
    def judge(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.scores(input_ids, attention_mask)

    def prefer(self, better: dict[str, Tensor], worse: dict[str, Tensor]) -> float:
        """Take a step that raises the scores of the better answers over those of the worse ones."""
        margin_N = self.scores(**better) - self.scores(**worse)
        loss = -nn.functional.logsigmoid(margin_N).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float((margin_N > 0).float().mean())


class RewardModelGRPO(Algorithm):
    """GRPO with rewards from a model."""

    num_preference_steps = 200

    def begin(self, run: Run) -> None:
        self.rewarder = run.build(RewardModel)
        for step in range(1, self.num_preference_steps + 1):
            [agreement] = self.rewarder.prefer(*pairs(run))
            if step % 50 == 0:
                print(f"reward model: {agreement:.2f} of the pairs after {step} steps", flush=True)
        self.rewarder.meta("optimizer", "grads")  # they are never needed again
        self.rewarder.offload("weights")

    def rollout(self, run: Run) -> Rollout:
        sampled = run.sample(run.num_problems)
        batch = rlcore.collate(sampled.outputs)
        run.infer.offload()
        self.rewarder.onload("weights")
        [scores_N] = self.rewarder.judge(batch["input_ids"], batch["attention_mask"])
        self.rewarder.offload("weights")
        run.infer.onload()
        return Rollout(sampled.problems, sampled.outputs, scores_N.view_as(sampled.rewards))


def pairs(run: Run) -> list[dict[str, Tensor]]:
    """Return right answers to some problems, and wrong ones: the teacher's without carries, or with a digit more."""
    problems = task.draw(run.training, PAIRS, run.generator)
    right = [task.answer_text(problem) for problem in problems]
    forgetful = [task.written_answer(problem, carries_kept=(False, False)) for problem in problems]
    wrong = [text if text != answer else answer + "0" for text, answer in zip(forgetful, right, strict=True)]
    batches = [task.answer_batch(problems, texts, run.tokenizer) for texts in (right, wrong)]
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches]


if __name__ == "__main__":
    main(RewardModelGRPO())
