"""``StrategyConfig``: the arguments that a strategy reads, with LightRFT's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rlcore.arguments import AT_LEAST_0, COUNT, LIST, MAPPING, NUMBER, TEXT, WHOLE, Kind, optional
from rlcore.errors import InvalidInputError, UnsupportedError

_NOT_HERE = {
    "fsdp_cpu_offload": "offload_model() and maybe_offload_optimizer() move whole parts",
    "use_mp_opt": "weights of the optimizer are float32 already; with bf16 the module computes with bfloat16",
}
"""Flags that change what is computed in LightRFT, and would change nothing here."""


_FLAG = Kind("True or False", lambda value: value in (True, False, None))
_BETAS = Kind(
    "a list or tuple of two numbers", lambda value: LIST.has(value) and len(value) == 2 and all(map(NUMBER.has, value))
)
_ACCEPTS = {
    **dict.fromkeys(("bf16", "fsdp", "fsdp_cpu_offload", "adam_offload", "use_mp_opt", "enable_engine_sleep"), _FLAG),
    **dict.fromkeys(("seed", "micro_train_batch_size", "train_batch_size", "zero_stage"), WHOLE),
    **dict.fromkeys(("engine_tp_size", "sp_size"), COUNT),
    **dict.fromkeys(("max_norm", "actor_learning_rate", "l2", "lr_warmup_ratio"), AT_LEAST_0),
    **dict.fromkeys(("train_options", "engine_options"), MAPPING),
    "adam_betas": _BETAS,
    "engine_mem_util": optional(AT_LEAST_0),
    "engine_type": TEXT,
}


@dataclass
class StrategyConfig:
    """The arguments of a program that strategies read. A field that ``args`` does not have keeps its default.

    ``train_options`` and ``engine_options`` are further options of ``TrainEngine.build`` and ``InferenceEngine.build``.
    """

    seed: int = 42
    max_norm: float = 1.0
    micro_train_batch_size: int = 1
    train_batch_size: int = 128
    bf16: bool = True
    zero_stage: int = 2
    fsdp: bool = False
    fsdp_cpu_offload: bool = False
    adam_offload: bool = False
    use_mp_opt: bool = False
    engine_type: str = "vllm"
    engine_tp_size: int = 1
    engine_mem_util: float | None = None
    enable_engine_sleep: bool = False
    sp_size: int = 1
    actor_learning_rate: float = 1e-5
    adam_betas: tuple[float, float] = (0.9, 0.95)
    l2: float = 0.0
    lr_warmup_ratio: float = 0.03
    train_options: dict[str, Any] = field(default_factory=dict)
    engine_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: Any) -> StrategyConfig:
        """Take over the attributes of ``args``, an ``argparse.Namespace`` or alike, by name."""
        given = {one.name: getattr(args, one.name) for one in fields(cls) if hasattr(args, one.name)}
        if args is None or (isinstance(args, Mapping) and not given):  # a dict has keys instead
            raise InvalidInputError(f"a strategy takes an argparse.Namespace or alike as args, got {args!r:.200}")
        config = cls(**given)
        for name, accepts in _ACCEPTS.items():
            if not accepts.has(value := getattr(config, name)):
                raise InvalidInputError(f"--{name} must be {accepts.words}, got {value!r:.200}")
        for name, instead in _NOT_HERE.items():
            if getattr(config, name):
                raise UnsupportedError(f"--{name}", instead)
        return config

    def accumulated_gradient(self, world_size: int) -> int:
        """Return how many micro-batches of each rank make one optimizer step."""
        together = self.micro_train_batch_size * world_size
        if together < 1 or self.train_batch_size < 1 or self.train_batch_size % together:
            raise InvalidInputError(
                "train_batch_size must be a multiple of micro_train_batch_size x ranks, got "
                f"{self.train_batch_size} for {self.micro_train_batch_size} x {world_size}"
            )
        return self.train_batch_size // together
