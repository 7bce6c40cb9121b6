"""How far the trainer's log-probabilities are from the sampler's, over all tokens of a step, while the loss runs.

Quantiles come of counts in bins that are 2 % wide, so that micro-batches and ranks add up, and nothing waits for the
device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

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
    """Adds up the differences of a step's tokens.

    Args:
        device: where log-probabilities are.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, device=device)
        self._counts = torch.zeros(_NUM_BINS, device=device)

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
        apart, size = apart_T.float(), apart_T.float().abs()
        ratio = apart.clamp(max=_LARGEST_LOG_RATIO).exp()
        self._sums += torch.stack([torch.ones_like(size), size, apart, ratio, ratio * ratio]).sum(1)
        bins = ((size.log2() - _FROM) * _BINS_A_DOUBLING).clamp(0, _NUM_BINS - 1).long()
        self._counts.index_add_(0, bins, torch.ones_like(size))

    def joined(self) -> dict[str, Tensor]:
        """Return the metrics over the tokens of all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            joined = torch.cat([self._sums, self._counts])
            dist.all_reduce(joined)
            self._sums, self._counts = joined[: len(self._sums)], joined[len(self._sums) :]
        count, size, apart, ratio, square = self._sums.unbind()
        divisor = count.clamp(min=1)
        number = torch.searchsorted(self._counts.cumsum(0), 0.99 * count)
        edge = torch.exp2((number + 1) / _BINS_A_DOUBLING + _FROM)
        return {
            f"{MISMATCH}mean": size / divisor,
            f"{MISMATCH}p99": torch.where(number > 0, edge, 0.0),
            f"{MISMATCH}bias": apart / divisor,
            f"{MISMATCH}effective_sample_size": torch.where(count > 0, ratio * ratio / (divisor * square), 1.0),
        }


def has_sampler_logprobs(names: Mapping[str, Tensor]) -> bool:
    return any(name in names for name in SAMPLER_ENTRIES)
