"""``FakeStrategy``: the same calls in one process on plain torch modules, without engines, for tests of programs."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import rlcore
from rlcore.compat.lightrft.configuration import StrategyConfig
from rlcore.compat.lightrft.generation import GeneratedSequence
from rlcore.compat.lightrft.schedule import CosineSchedule
from rlcore.compat.lightrft.strategy_base import StrategyBase


class FakeStrategy(StrategyBase):
    """Trains what it is given as it is; generates nothing."""

    executor = "fsdp2"

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        self.set_seed(self.seed)
        self.device, self.world_size, self.is_torchrun = rlcore.get_device(), 1, False

    @classmethod
    def is_rank_0(cls) -> bool:
        return True

    def get_rank(self) -> int:
        return 0

    def prepare_model(
        self, model: Any, is_training: bool = False, shard_size: int | str = -1, reshard_after_forward: bool = True
    ) -> Any:
        return model

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        settings: dict[str, Any] = {"lr": self.config.actor_learning_rate, "betas": self.config.adam_betas}
        return torch.optim.AdamW(model.parameters(), **settings | kwargs)

    def prepare(self, *models_or_model_optim_pairs: Any, is_rlhf: bool = False) -> Any:
        return models_or_model_optim_pairs[0] if len(models_or_model_optim_pairs) == 1 else models_or_model_optim_pairs

    def prepare_models_and_optimizers(  # noqa: PLR0917 (as in LightRFT)
        self, actor: Any, critic: Any, reward_models: Any, initial_model: Any, args: Any, max_steps: int
    ) -> tuple[Any, ...]:
        """Return what is given, with an optimizer and a scheduler for the actor and the critic."""
        return self._trained(actor, max_steps), self._trained(critic, max_steps), reward_models, initial_model

    def _trained(self, model: nn.Module | None, max_steps: int) -> tuple[Any, Any, Any]:
        if model is None:
            return None, None, None
        optimizer = self.create_optimizer(model)
        schedule = CosineSchedule(math.ceil(max_steps * self.config.lr_warmup_ratio), max_steps)
        return model, optimizer, LambdaLR(optimizer, schedule)

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None = None,
        name: str = "actor",
        **kwargs: Any,
    ) -> None:
        if self.max_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    def setup_inference_engine(self, args: Any, engine_type: str = "vllm", actor: Any = None) -> Any:
        return None

    def engine_generate_local(
        self, sampling_params: Any, prompt_token_ids: Any = None, multi_modal_inputs: Any = None
    ) -> list[GeneratedSequence]:
        return []

    def offload_model(self, models: Any, empty_cache: bool = True) -> None:
        """Do nothing."""

    def reload_model(self, models: Any) -> None:
        """Do nothing."""


def get_fake_strategy(args: Any = None) -> FakeStrategy:
    """Return a ``FakeStrategy`` with the settings of ``args``."""
    config = StrategyConfig() if args is None else StrategyConfig.from_args(args)
    return FakeStrategy(config.seed, config.max_norm, config.micro_train_batch_size, config.train_batch_size, args)
