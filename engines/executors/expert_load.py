"""How evenly a step's tokens are dealt out to the experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.engines.executors.micro_batch import MicroBatch
from rlcore.routing.counting import counting
from rlcore.routing.routers import Router

EXPERT_LOAD = "expert_load/"
"""The names of these metrics begin with it."""


class ExpertLoad:
    """Counts the tokens that each expert computes, on the device.

    Args:
        routers: of the model; not none, and all of which ``can_count``.
    """

    def __init__(self, routers: Sequence[Router], device: torch.device) -> None:
        self._routers = routers
        most = max(router.num_experts for router in routers)
        self._counts = torch.zeros(len(routers), most, dtype=torch.int64, device=device)
        """Below 0 where a layer has fewer experts than another one."""
        for row, router in enumerate(routers):
            if router.num_experts < most:
                self._counts[row, router.num_experts :] = -1

    def counting(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Return a context inside which the model computes this micro-batch.

        Blocks that are computed again are counted again, all of them and each token: shares stay what they are. So do
        they where several ranks compute the same tokens.
        """
        place_T = torch.arange(micro_batch.num_hidden, device=self._counts.device)
        is_counted_T = (place_T < micro_batch.num_counted).long()
        return counting(self._routers, self._counts, is_counted_T, micro_batch.tokens["cu_seqlens"])

    def joined(self) -> dict[str, Tensor]:
        """Return the metrics over the tokens of all ranks and the layers that had some; NaN if none was counted.

        ``max_over_mean``: the busiest expert's tokens over the mean, of the layer that is least even; 1 is even.
        ``entropy``: that of the shares over log(experts), the mean of the layers; 1 is even.
        ``unused``: the share of experts that no token has.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._counts)
        counts, is_expert = self._counts.clamp(min=0), self._counts >= 0
        total, num_experts = counts.sum(1, keepdim=True), is_expert.sum(1, keepdim=True)
        share, is_counted = counts / total.clamp(min=1), total > 0
        entropy = -torch.special.xlogy(share, share) / num_experts.clamp(min=2).log()
        unused, of_all = ((counts == 0) & is_expert & is_counted).sum(), (is_expert & is_counted).sum()
        return {
            f"{EXPERT_LOAD}max_over_mean": torch.where(is_counted.any(), (share * num_experts).max(), math.nan),
            f"{EXPERT_LOAD}entropy": entropy.sum() / is_counted.sum(),
            f"{EXPERT_LOAD}unused": unused / of_all,
        }
