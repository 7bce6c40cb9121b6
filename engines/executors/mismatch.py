"""How far the trainer's log-probabilities are from the sampler's, over all tokens of a step, while the loss runs.

Quantiles come of counts in bins that are 2 % wide, so that micro-batches and ranks add up, and nothing waits for the
device.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, as_level_of

SAMPLER_ENTRIES = ("rollout_logprobs", "old_logprobs")
"""The entries of a batch that have the sampler's log-probabilities; the first one that is there has."""
MISMATCH = "mismatch/"
"""The names of these metrics begin with it."""
_BINS_A_DOUBLING, _FROM, _TO = 32, -40, 8
_NUM_BINS = (_TO - _FROM) * _BINS_A_DOUBLING
_LARGEST_LOG_RATIO = 20.0
"""So that the square of a ratio is a number in float32."""


class Mismatch:
    """Keeps the differences of a step's tokens, 4 bytes each, until the step's metrics are joined.

    Args:
        device: where log-probabilities are.
    """

    def __init__(self, device: torch.device) -> None:
        self._apart = [torch.zeros(0, device=device)]

    def watching(self, loss_fn: LossFn) -> LossFn:
        """Return ``loss_fn``, which is seen when it is called with the log-probabilities of a chunk."""

        @functools.wraps(loss_fn, updated=())
        def watched(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
            sampled = next((per_token[name] for name in SAMPLER_ENTRIES if name in per_token), None)
            if sampled is not None:
                self.add(logprob.detach() - sampled)
            return loss_fn(logprob, entropy, per_token)

        return as_level_of(watched, loss_fn)

    def add(self, apart_T: Tensor) -> None:
        """Take the trainer's log-probabilities less the sampler's."""
        self._apart.append(apart_T.float())

    def joined(self) -> dict[str, Tensor]:
        """Return the metrics over the tokens of all ranks."""
        apart = torch.cat(self._apart)
        size, ratio = apart.abs(), apart.clamp(max=_LARGEST_LOG_RATIO).exp()
        sums = torch.stack([size, apart, ratio, ratio * ratio]).sum(1)
        bins = ((size.log2() - _FROM) * _BINS_A_DOUBLING).clamp(0, _NUM_BINS - 1).long()
        counts = torch.zeros(_NUM_BINS, device=apart.device).index_add_(0, bins, torch.ones_like(size))
        if dist.is_initialized() and dist.get_world_size() > 1:
            both = torch.cat([sums, counts])
            dist.all_reduce(both)
            sums, counts = both[: len(sums)], both[len(sums) :]
        size, apart, ratio, square = sums.unbind()
        reached = counts.cumsum(0)
        count = reached[-1]
        number, divisor = torch.searchsorted(reached, 0.99 * count), count.clamp(min=1)
        edge = torch.exp2((number + 1) / _BINS_A_DOUBLING + _FROM)
        return {
            f"{MISMATCH}mean": size / divisor,
            f"{MISMATCH}p99": torch.where(number > 0, edge, 0.0),
            f"{MISMATCH}bias": apart / divisor,
            f"{MISMATCH}effective_sample_size": torch.where(count > 0, ratio * ratio / (divisor * square), 1.0),
        }
