"""The methods of the quickstart's model, which the train engine calls where the weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.nn import HuggingFaceTrainModule
from rlcore.quickstart.pretrained import model_class


class PolicyMethods(HuggingFaceTrainModule):
    """Mixed into the model's own class by ``policy_class``."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), betas=(0.9, 0.95))

    def imitate(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> float:
        """Do one supervised step; return the loss."""
        device: Any = self.device
        logits = self(input_ids.to(device), attention_mask.to(device)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten().to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def begin_reinforcement(self) -> None:
        """Start GRPO with a new optimizer, without the moments of the warm-start."""
        self.optimizer = torch.optim.AdamW(self.parameters())

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.optimizer.param_groups[0]["lr"] = rate


def policy_class(path: Path) -> Any:
    """Return ``class QuickstartPolicy(PolicyMethods, <model class of the folder>)``; raises as ``model_class``."""
    return type("QuickstartPolicy", (PolicyMethods, model_class(path)), {})
