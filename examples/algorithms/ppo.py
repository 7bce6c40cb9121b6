"""PPO (arXiv:1707.06347) with a critic: a second train engine, of the same model with a head for values."""

from typing import Any

import torch
from torch import Tensor, nn

from rlcore.examples.algorithms.loop import Algorithm, Batch, Rollout, Run, main
from rlcore.examples.algorithms.reinforce_plus_plus import token_rewards
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import gae, masked_whiten, token_weights, value_loss

CRITIC_RATE, VALUE_CLIP = 1e-3, 0.5


class Critic(HuggingFaceTrainModule):
    """Mixed into the model's class: the value of the answer so far, before each token."""

    new_parameters = ("value_head",)  # which the model folder does not have

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.value_head = nn.Linear(config.hidden_size, 1)

    def on_weights_materialized(self) -> None:
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=CRITIC_RATE)

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return [N, L]: at token t what the tokens before it are worth."""
        device: Any = self.device
        inputs = input_ids.to(device), attention_mask.to(device)
        hidden_NLH = self.get_decoder()(*inputs).last_hidden_state  # type: ignore[operator]
        return nn.functional.pad(self.value_head(hidden_NLH).squeeze(-1)[:, :-1], (1, 0))

    @torch.no_grad()
    def judge(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.values(input_ids, attention_mask).cpu()

    def fit(self, batch: Batch) -> float:
        """Take a step towards the returns."""
        device: Any = self.device
        batch = {name: entry.to(device) for name, entry in batch.items()}
        values_NL = self.values(batch["input_ids"], batch["attention_mask"])
        weight_NL = token_weights("token-mean", batch["loss_mask"])
        old_NL = batch["old_values"]
        loss = value_loss(values_NL, batch["returns"], weight_NL, old_values=old_NL, clip=VALUE_CLIP).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class PPO(Algorithm):
    """Proximal policy optimization with generalised advantage estimates."""

    token_weights = "token-mean"

    def begin(self, run: Run) -> None:
        self.critic = run.build(Critic)

    def prepare(self, run: Run, rollout: Rollout, batch: Batch) -> None:
        mask_NL = batch["loss_mask"]
        [values_NL] = self.critic.judge(batch["input_ids"], batch["attention_mask"])
        rewards_NL = token_rewards(rollout.rewards.flatten(), mask_NL)
        found = gae(values_NL, rewards_NL, mask_NL, lam=0.95)
        batch |= {"old_values": values_NL, "returns": found.returns}
        batch["advantages"] = masked_whiten(found.advantages, mask_NL)

    def learn(self, run: Run, batch: Batch) -> dict[str, float]:
        for minibatch in run.minibatches(batch, self.num_minibatches):
            self.critic.fit(minibatch)
        return super().learn(run, batch)


if __name__ == "__main__":
    main(PPO())
