"""``get_strategy``, and the strategies of FSDP and of DeepSpeed."""

from __future__ import annotations

from typing import Any

from rlcore.compat.lightrft.configuration import StrategyConfig
from rlcore.compat.lightrft.strategy_base import StrategyBase


class FSDPV2Strategy(StrategyBase):
    """Trains by the executor ``fsdp2``."""

    executor = "fsdp2"


class DeepspeedStrategy(StrategyBase):
    """Trains by the executor ``deepspeed``; it runs under torchrun alone, also on one rank."""

    executor = "deepspeed"

    def _build_options(self) -> dict[str, Any]:
        return {"stage": self.config.zero_stage} | super()._build_options() | {"launcher": "torchrun"}

    def get_ds_train_config(self, is_actor: bool) -> dict[str, Any]:
        """Return what an actor's ``ds_config`` takes; the strategy itself configures DeepSpeed."""
        return {"zero_optimization": {"stage": self.config.zero_stage}}

    def get_ds_eval_config(self, offload: bool = False) -> dict[str, Any]:
        """Return what a reference's ``ds_config`` takes."""
        return self.get_ds_train_config(is_actor=False)


def get_strategy(args: Any) -> StrategyBase:
    """Return the strategy that ``args`` asks for: FSDP's with ``args.fsdp``, else DeepSpeed's."""
    config = StrategyConfig.from_args(args)
    kind = FSDPV2Strategy if config.fsdp else DeepspeedStrategy
    return kind(config.seed, config.max_norm, config.micro_train_batch_size, config.train_batch_size, args)


def is_engine(model: Any) -> bool:
    """Return True for an inference engine."""
    return hasattr(model, "generate") and hasattr(model, "onload")
