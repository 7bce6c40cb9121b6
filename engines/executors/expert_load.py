"""How evenly a step's tokens are dealt out to the experts, of the routes that are replayed."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.routing.routers import NO_ROUTE, Router

EXPERT_LOAD = "expert_load/"
"""The names of these metrics begin with it."""


class ExpertLoad:
    """Counts the tokens of each expert.

    Args:
        routers: of the model; not none.
    """

    def __init__(self, routers: list[Router], device: torch.device) -> None:
        self._layers = torch.tensor([router.layer for router in routers], device=device)
        self._num_experts = max(router.num_experts for router in routers)
        self._counts = torch.zeros(len(routers) * self._num_experts, device=device)

    def add(self, routes_TLK: Tensor) -> None:
        """Take the routes of some tokens."""
        of_layers = routes_TLK.index_select(1, self._layers).long()
        first = torch.arange(len(self._layers), device=of_layers.device) * self._num_experts
        experts = (of_layers + first[:, None]).flatten()
        self._counts.index_add_(0, experts.clamp(min=0), (of_layers != NO_ROUTE).flatten().float())

    def joined(self) -> dict[str, Tensor]:
        """Return the metrics over the tokens of all ranks.

        ``max_over_mean``: the busiest expert's tokens over the mean, of the layer that is least even; 1 is even.
        ``entropy``: that of the shares over log(experts), the mean of the layers; 1 is even.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._counts)
        counts = self._counts.view(len(self._layers), self._num_experts)
        share = counts / counts.sum(1, keepdim=True).clamp(min=1)
        entropy = -torch.special.xlogy(share, share).sum(1) / math.log(max(2, self._num_experts))
        return {
            f"{EXPERT_LOAD}max_over_mean": share.max() * self._num_experts,
            f"{EXPERT_LOAD}entropy": entropy.mean(),
        }
