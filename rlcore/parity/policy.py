"""The model as the trainer computes it, with methods that look inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.activations import last_logits, recording
from rlcore.nn import HuggingFaceTrainModule
from rlcore.quickstart.pretrained import model_class
from rlcore.routing.record import RouteRecorder


class ProbedMethods(HuggingFaceTrainModule):
    """Mixed into the model's own class by ``probed_class``."""

    @torch.no_grad()
    def part_results(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Return what each part computes of one sequence, by the names of ``rlcore.activations``."""
        with recording(self) as found:
            hidden_TH = self._hidden(token_ids)
        head: Any = self.output_head()
        return found | {"head": last_logits(hidden_TH, head).cpu()}

    @torch.no_grad()
    def own_routes(self, token_ids: list[int]) -> Tensor:
        """Return the experts that the routers select for one sequence, [tokens, layers, experts]."""
        _, routes = RouteRecorder(self).during(lambda: self._hidden(token_ids))
        return routes.cpu()

    def _hidden(self, token_ids: list[int]) -> Tensor:
        tokens = torch.tensor(token_ids, device=self.device)  # type: ignore[arg-type]
        return self.hidden_states({"input_ids": tokens, "cu_seqlens": torch.tensor([0, len(token_ids)]).int()})


def probed_class(path: Path) -> Any:
    """Return ``class ProbedPolicy(ProbedMethods, <model class of the folder>)``.

    Raises:
        CheckpointError: it is not a causal language model, or not one that transformers knows.
    """
    return type("ProbedPolicy", (ProbedMethods, model_class(path)), {})
