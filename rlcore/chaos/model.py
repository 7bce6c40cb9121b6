"""The module that the programs train: a tiny Qwen2 that can be made to fail and to run any function in its worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlcore.nn import HuggingFaceTrainModule


class PlannedError(Exception):
    """The error of a user's code that is planned."""


def policy(folder: Path) -> Any:
    """Return the module for the model folder; on meta under ``meta_device()``."""
    import transformers

    class ChaosPolicy(HuggingFaceTrainModule, transformers.Qwen2ForCausalLM):  # type: ignore[misc]
        fails_in = -1
        """The number of forward passes until one fails."""

        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

        def hidden_states(self, batch: Any) -> Any:
            self.fails_in -= 1
            if self.fails_in == -1:
                raise PlannedError("planned by rlcore chaos")
            return super().hidden_states(batch)

        def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
            return function(self, *arguments)

        def echo(self, value: Any) -> Any:
            return value

        def fail_in(self, rank: int, num_passes: int) -> None:
            here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            self.fails_in = num_passes if here == rank else -1

        def sums(self) -> list[float]:
            """Sums that tell this rank's parameters and optimizer state from others."""
            parts = [*self.parameters(), *(part for state in self.optimizer.state.values() for part in state.values())]
            own = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
            return [float(part.detach().double().sum()) for part in own if isinstance(part, torch.Tensor)]

    return ChaosPolicy.from_pretrained(folder)
