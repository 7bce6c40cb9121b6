"""A reward model is one more TrainEngine: it learns from pairs which answer is better, and then rewards a policy.

A teacher prefers the answer with more sevens. The reward model sees only which of two answers he preferred; the policy
sees only the reward model. Scores are computed for a whole batch, where the reward model's weights are. While the
policy learns, one of the two models is in host memory.

Letters: N sequences, L longest sequence, T tokens of all sequences, H hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import group_advantage, ppo_clip
from rlcore.quickstart.host_threads import host_threads
from rlcore.quickstart.model import quickstart_model
from rlcore.rollout import RolloutController, SingleTurn, collate_trajectories

SEVEN, SAMPLES, MAX_TOKENS = 7, 16, 6
PROMPTS = [{"prompt": f"{a}+{b}="} for a in range(10, 30) for b in range(10, 30)]


class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4)


class RewardModel(HuggingFaceTrainModule, Qwen2ForTokenClassification):
    """Scores a sequence at its last token. The weights begin as the policy's, ``score`` is new."""

    new_parameters = ("score",)
    score: nn.Module

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)

    def scores(self, ids_NL, mask_NL):
        with torch.no_grad():
            return self._scores(ids_NL, mask_NL).cpu()

    def learn_preferences(self, ids_NL, mask_NL):
        """Rows are pairs: the preferred answer, then the other one (Bradley and Terry's loss); return the loss."""
        better_P, worse_P = self._scores(ids_NL, mask_NL).view(-1, 2).unbind(1)
        loss = -nn.functional.logsigmoid(better_P - worse_P).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _scores(self, ids_NL, mask_NL):
        ends_N = mask_NL.sum(1).cumsum(0)
        batch = {"input_ids": ids_NL[mask_NL].to(self.device), "cu_seqlens": nn.functional.pad(ends_N, (1, 0)).int()}
        return self.score(self.hidden_states(batch))[ends_N - 1, 0]


def sevens(batch: dict[str, Tensor]) -> Tensor:
    """The teacher's taste, which no model sees."""
    return ((batch["input_ids"] == SEVEN) & batch["loss_mask"]).sum(1)


def teach(reward_model: rlcore.TrainEngine, batch: dict[str, Tensor]) -> float:
    """Make pairs of two neighbours of a batch, of which the teacher prefers one, and learn from them."""
    left_P, right_P = sevens(batch).view(-1, 2).unbind(1)
    rows_P2 = torch.arange(len(batch["input_ids"])).view(-1, 2)
    ordered_P2 = torch.where((left_P >= right_P)[:, None], rows_P2, rows_P2.flip(1))
    rows = ordered_P2[left_P != right_P].flatten()
    (loss,) = reward_model.learn_preferences(batch["input_ids"][rows], batch["attention_mask"][rows])
    return float(loss)


def agreement_with_teacher(reward_model: rlcore.TrainEngine, batch: dict[str, Tensor]) -> float:
    """Return the share of pairs, of all that differ for the teacher, that the scores order as he does."""
    (score_N,) = reward_model.scores(batch["input_ids"], batch["attention_mask"])
    count_N = sevens(batch)
    taste_NN, found_NN = (count_N[:, None] - count_N).sign(), (score_N[:, None] - score_N).sign()
    return float((taste_NN == found_NN)[taste_NN != 0].float().mean())


def improve(policy: rlcore.TrainEngine, reward_model: rlcore.TrainEngine, batch: dict[str, Tensor]) -> None:
    """One GRPO step by the reward model's scores; the device has one of the two at a time."""
    policy.offload()
    reward_model.onload()
    batch["rewards"] = reward_model.scores(batch["input_ids"], batch["attention_mask"])[0]
    reward_model.offload()
    policy.onload()
    batch["advantages"] = group_advantage(batch["rewards"], group=batch["group"])
    policy.train_batch(batch, ppo_clip())


@host_threads(1)  # the model is small: more threads of the host would wait for each other
def main(num_lessons: int = 30, num_steps: int = 8) -> tuple[float, float, float]:
    torch.manual_seed(0)
    path = quickstart_model(seed=0)
    with rlcore.meta_device():
        policy_module = Policy.from_pretrained(path)
        reward_config = Qwen2Config.from_pretrained(path, num_labels=1, use_cache=False)
        reward_module = RewardModel.from_pretrained(path, config=reward_config)
    engines = rlcore.TrainEngine(policy_module), rlcore.TrainEngine(reward_module), rlcore.InferenceEngine(path)
    with engines[0] as policy, engines[1] as reward_model, engines[2] as infer:
        policy.build()
        reward_model.build(devices=policy.device)
        infer.build(colocate_with=policy)
        # The rewards of the workflow are not used: a batch is scored as a whole.
        workflow = SingleTurn(lambda data, text: 0.0, {"n": SAMPLES, "max_tokens": MAX_TOKENS, "ignore_eos": True})
        with RolloutController(infer, workflow, batch_size=8, max_staleness=0) as rollout:
            for lesson in range(num_lessons):
                episodes = rollout.evaluate(PROMPTS[lesson % 25 * 8 :][:8])
                batch = collate_trajectories([one.trajectories for one in episodes])
                loss = teach(reward_model, batch)
            agreement = agreement_with_teacher(reward_model, batch)
            print(f"reward model: loss {loss:.3f}, agrees with the teacher on {agreement:.0%} of the pairs")
            reward_model.offload()
            counts = []
            for step in range(num_steps):
                batch = rollout.prepare_batch(PROMPTS)
                counts.append(float(sevens(batch).float().mean()))
                improve(policy, reward_model, batch)
                rollout.update_weights(policy)
                print(f"step {step:2}  sevens in an answer {counts[-1]:.2f}")
    return agreement, counts[0], counts[-1]


if __name__ == "__main__":
    main()
