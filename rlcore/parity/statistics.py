"""Statistics of the differences between the trainer's log-probabilities and the sampler's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_LARGEST_LOG_RATIO = 500.0
"""So that the square of a ratio is a number in float64."""


@dataclass(frozen=True, slots=True)
class LogProbAgreement:
    """How far apart the two are, over all sampled tokens. A difference is the trainer's less the sampler's."""

    tokens: int
    mean: float
    """The mean of absolute differences; the next two are theirs, too."""
    p99: float
    max: float
    bias: float
    """The mean of the differences themselves."""
    ratio_mean: float
    """The mean of importance ratios, exp(difference); the next two are theirs, too."""
    ratio_p99: float
    ratio_max: float
    effective_sample_size: float
    """(sum of ratios)^2 / sum of their squares / tokens: the share of tokens that the batch is worth."""

    @property
    def lost(self) -> float:
        """The expected loss of sample efficiency."""
        return 1 - self.effective_sample_size

    @classmethod
    def of(cls, apart_T: Tensor) -> LogProbAgreement:
        """Return that of the differences of at least one token."""
        apart, size = apart_T.double(), apart_T.double().abs()
        ratio = apart.clamp(max=_LARGEST_LOG_RATIO).exp()
        return cls(
            tokens=len(apart),
            mean=float(size.mean()),
            p99=_quantile(size, 0.99),
            max=float(size.max()),
            bias=float(apart.mean()),
            ratio_mean=float(ratio.mean()),
            ratio_p99=_quantile(ratio, 0.99),
            ratio_max=float(ratio.max()),
            effective_sample_size=float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())),
        )


@dataclass(frozen=True, slots=True)
class PositionDifference:
    """The absolute differences at positions ``start <= i < stop`` of completions."""

    start: int
    stop: int
    mean: float
    p99: float


def by_position(apart_NS: Tensor, count: int = 8) -> list[PositionDifference]:
    """Return ``count`` parts of the completions [N, S], of which all have S tokens."""
    size_NS, longest = apart_NS.double().abs(), apart_NS.shape[1]
    edges = torch.linspace(0, longest, min(count, longest) + 1).round().long().tolist()
    parts = [(start, stop, size_NS[:, start:stop].flatten()) for start, stop in pairwise(edges)]
    return [PositionDifference(start, stop, float(part.mean()), _quantile(part, 0.99)) for start, stop, part in parts]


def _quantile(values: Tensor, share: float) -> float:
    """Return the smallest value that is not exceeded by this share of the values; ``torch.quantile`` takes 2^24."""
    ordered = values.sort().values
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
