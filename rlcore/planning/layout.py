"""A way to run a step on some devices. Plans compare them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Recompute = bool | Literal["selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Where trainer and sampler run, and how."""

    count: int = 1
    """Devices, which both share."""
    replicas: int = 1
    """Copies of the trainer's weights, each cut over ``count`` / ``replicas`` devices."""
    sequence_parallel: int = 1
    """Devices that share the tokens of each micro-batch of the trainer; its weights are cut over them, too."""
    tensor_parallel: int = 1
    """Devices of one copy of the sampler."""
    recompute: Recompute = False
    max_tokens: int = 16384
    """``max_tokens_per_micro_batch``."""
    offload: tuple[str, ...] = ()
    """The trainer's tags that leave the device while the sampler runs."""

    @property
    def shards(self) -> int:
        return self.count // self.replicas

    def build_options(self) -> dict[str, Any]:
        """Return the arguments of ``TrainEngine.build`` in which it differs from the defaults."""
        options: dict[str, Any] = {}
        data_parallel = self.shards // self.sequence_parallel
        if data_parallel > 1:
            options["data_parallel_size"] = data_parallel
        if self.sequence_parallel > 1:
            options["sequence_parallel_size"] = self.sequence_parallel
        if self.replicas > 1:
            options["replicas"] = self.replicas
        if self.recompute:
            options["activation_checkpointing"] = self.recompute
        return options
