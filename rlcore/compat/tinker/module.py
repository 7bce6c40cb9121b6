"""The module that the train engine runs: a model with LoRA adapters, whose gradients add up until a step.

Letters: T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlcore
from rlcore.compat.tinker.losses import LOSSES, READS
from rlcore.compat.tinker.types import AdamParams
from rlcore.errors import InvalidInputError, MissingDependencyError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import linear_logprob
from rlcore.quickstart.pretrained import model_class

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


class TinkerMethods(HuggingFaceTrainModule):
    """Mixed into the model's own class by ``lora_module``."""

    def on_weights_materialized(self) -> None:
        adapters = [one for one in self.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(adapters)

    def accumulate(
        self, packed: Mapping[str, Tensor], loss: str, config: Mapping[str, float], with_gradients: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of the targets and the loss of each token, [T]; add the gradients of the loss's sum.

        Args:
            packed: ``input_ids``, ``target_tokens`` [T] int64, ``cu_seqlens``, and what the loss reads, [T] float32.
        """
        device: Any = self.device
        batch = {name: value if name == "cu_seqlens" else value.to(device) for name, value in packed.items()}
        with torch.set_grad_enabled(with_gradients):
            hidden_TH, head = self.hidden_states(batch), self.output_head()
            logprob_T = linear_logprob(hidden_TH, targets=batch["target_tokens"], **head._asdict()).logprob
            inputs = {name: batch[name] for name in READS[loss]}
            loss_T = LOSSES[loss](logprob_T, inputs, config)
        if with_gradients:
            loss_T.sum().backward()  # type: ignore[no-untyped-call]
        return logprob_T.detach().cpu(), loss_T.detach().cpu()

    def step_adam(self, params: Mapping[str, float]) -> float:
        """Take a step with the gradients so far; return their norm.

        Raises:
            InvalidInputError: the norm is not finite. The gradients are dropped, and the adapters are as before.
        """
        group = self.optimizer.param_groups[0]
        group |= {name: params[name] for name in ("eps", "weight_decay")}
        group |= {"lr": params["learning_rate"], "betas": (params["beta1"], params["beta2"])}
        limit = params["grad_clip_norm"] or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(group["params"], limit))
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise InvalidInputError(
                f"optim_step() takes no step with gradients whose norm is {norm}: they are dropped, and the adapters "
                "are as before; look for extreme values in the data, or give grad_clip_norm and a smaller learning rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def reset_optimizer(self) -> None:
        """Forget the moments, so that the next step is as the first one."""
        self.optimizer.state.clear()


def plain(params: AdamParams) -> dict[str, float]:
    return asdict(params)


def lora_module(path: Path, *, rank: int, seed: int | None, train_mlp: bool, train_attn: bool) -> Any:
    """Return the module of a model folder with new adapters, made from ``seed``."""
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError("peft", needed_for="create_lora_training_client()", extra="hf") from error
    if seed is not None:
        torch.manual_seed(seed)
    targets = [*(ATTENTION if train_attn else ()), *(MLP if train_mlp else ())]
    with rlcore.meta_device():
        kind: Any = type("TinkerModel", (TinkerMethods, model_class(path)), {})
        module = kind.from_pretrained(path)
        module.add_adapter(peft.LoraConfig(r=rank, lora_alpha=32, target_modules=targets))
    return module
