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
        if self.shards > 1:
            options["data_parallel_size"] = self.shards
        if self.replicas > 1:
            options["replicas"] = self.replicas
        if self.recompute:
            options["activation_checkpointing"] = self.recompute
        return options
