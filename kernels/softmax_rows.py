"""The softmax of rows of logits, with only a chunk of rows in memory at a time.

    c_v = s (z_v - max z)      a = sum_v exp(c_v)      p_v = exp(c_v) / a
    logprob = c_y - ln a       entropy = -sum_v p_v ln p_v = ln a - (1/a) sum_v exp(c_v) c_v
    dz_v = s (g_logprob (1[v=y] - p_v) - g_entropy p_v (ln p_v + entropy))

z are the logits and y is the target. s is the inverse temperature: the model's logit scale / temperature. g_* are the
gradients of the outputs. The maximum is subtracted before the division by the temperature: the difference of two close
floats is exact, so a large common offset costs no accuracy. exp(c) ln exp(c) is 0 where c = -inf (``xlogy``), so
columns may be masked with -inf. ``row_stats`` has more numbers of a row. Functions whose names end in ``_`` overwrite
their first argument.

Letters: T rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, overload

import torch
from torch import Tensor

from rlcore.kernels.row_stats import row_stats_dtype

NO_ROW_STATS: Mapping[str, Tensor] = MappingProxyType({})


class _LogprobAndEntropy(NamedTuple):
    logprob: Tensor
    """Shape of the targets, float32 (float64 for float64 inputs), nats, <= 0; 0 in ignored rows."""
    entropy: Tensor | None
    """The entropy of the whole distribution: same shape and dtype, nats, >= 0. None unless asked for."""


class Logprobs(_LogprobAndEntropy):
    """The result of ``token_logprob`` and ``linear_logprob``: a tuple of ``logprob`` and ``entropy``.

    Both have the shape of the targets and are in nats, float32 (float64 for float64 inputs), 0 in ignored rows. The
    log-probability is <= 0. The entropy is that of the whole distribution, >= 0, and None unless asked for.
    """

    row_stats: Mapping[str, Tensor] = NO_ROW_STATS
    """The numbers of ``row_stats=`` by name, shaped like the targets, without gradient; 0, or False, in ignored rows.
    They are no part of the tuple."""

    def with_row_stats(self, row_stats: Mapping[str, Tensor]) -> Logprobs:
        """Return the same tuple with these numbers."""
        found = Logprobs(*self)
        found.row_stats = row_stats
        return found


class RowStatistics(NamedTuple):
    """The numbers, besides the logits, that the gradient of a row needs. Vectors [T]."""

    logprob: Tensor
    entropy: Tensor | None
    peak: Tensor
    """max_v z_v"""
    total: Tensor
    """a"""
    row_stats: Mapping[str, Tensor] = NO_ROW_STATS
    """Numbers to report; the gradient does not need them."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmaxes and of accumulated gradients: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def column(values: float | Tensor) -> float | Tensor:
    """Return a factor of each row in the shape that multiplies the rows."""
    return values[..., None] if isinstance(values, Tensor) else values


@dataclass(frozen=True)
class ScaledRows:
    """The targets and temperatures of rows of logits."""

    labels: Tensor
    """The targets as the caller gave them, int64 or int32, with ``ignore_index`` in ignored rows."""
    ignore_index: int
    inverse_temperature: float | Tensor
    """The factor of the logits: one number, or a tensor like ``labels``."""
    is_elsewhere: Tensor | None = None
    """True where the target's column is not among those at hand, and ``target`` is 0. None: all are at hand."""

    @functools.cached_property
    def ignored(self) -> Tensor:
        """Bool, like ``labels``."""
        return self.labels == self.ignore_index

    @functools.cached_property
    def target(self) -> Tensor:
        """int64; 0 in ignored rows."""
        return self.labels.masked_fill(self.ignored, 0).long()

    def at(self, index: slice | tuple[int | slice, ...]) -> ScaledRows:
        factor = self.inverse_temperature
        is_elsewhere = None if self.is_elsewhere is None else self.is_elsewhere[index]
        factor = factor[index] if isinstance(factor, Tensor) else factor
        part = ScaledRows(self.labels[index], self.ignore_index, factor, is_elsewhere)
        # Computed once for all chunks: each small kernel of a chunk delays its matrix products.
        vars(part).update(ignored=self.ignored[index], target=self.target[index])
        return part

    def with_factors(self) -> ScaledRows:
        """Return the same rows with one inverse temperature each, float32."""
        factor = self.inverse_temperature
        if isinstance(factor, Tensor):
            return self
        factors = torch.full_like(self.labels, factor, dtype=torch.float32)
        same = ScaledRows(self.labels, self.ignore_index, factors, self.is_elsewhere)
        vars(same).update(ignored=self.ignored, target=self.target)
        return same

    def reshaped(self, shape: Sequence[int]) -> ScaledRows:
        factor = self.inverse_temperature
        factor = factor.reshape(shape) if isinstance(factor, Tensor) else factor
        is_elsewhere = None if self.is_elsewhere is None else self.is_elsewhere.reshape(shape)
        return ScaledRows(self.labels.reshape(shape), self.ignore_index, factor, is_elsewhere)

    def zero_ignored_rows(self, values_TX: Tensor) -> Tensor:
        """Return ``values_TX`` with 0 in ignored rows. Nothing that they held, NaN included, gets into a sum."""
        return values_TX.masked_fill(self.ignored[..., None], 0.0)

    @overload
    def zero_ignored(self, values_T: Tensor) -> Tensor: ...
    @overload
    def zero_ignored(self, values_T: None) -> None: ...
    def zero_ignored(self, values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T.masked_fill(self.ignored, 0.0)


NO_ROWS = ScaledRows(torch.empty(0, device="cpu"), 0, 1.0)
"""It stands for rows where only an operator's options are asked for."""


def statistics_(
    logits_TV: Tensor, rows: ScaledRows, *, with_entropy: bool, row_stats: Sequence[str] = ()
) -> RowStatistics:
    """Return the statistics of rows of wide logits, and overwrite the logits with exp(c)."""
    found = _row_stats_of_logits(logits_TV, rows, row_stats)
    peak_T = logits_TV.amax(1)
    centred_TV = logits_TV.sub_(peak_T[:, None]).mul_(column(rows.inverse_temperature))
    chosen_T = centred_TV.gather(1, rows.target[:, None]).squeeze(1)
    exp_TV = centred_TV.exp_()
    total_T = exp_TV.sum(1)
    log_total_T = total_T.log()
    entropy_T = None
    if with_entropy:
        entropy_T = log_total_T - torch.xlogy(exp_TV, exp_TV).sum(1) / total_T
    if "sum_squares" in row_stats:
        found["sum_squares"] = exp_TV.square().sum(1) / total_T.square()
    return RowStatistics(chosen_T - log_total_T, entropy_T, peak_T, total_T, found)


def row_stats_(
    logits_TV: Tensor, rows: ScaledRows, names: Sequence[str], peak_T: Tensor, total_T: Tensor
) -> dict[str, Tensor]:
    """Return the ``row_stats`` of wide logits whose peak and total are known, and overwrite the logits."""
    found = _row_stats_of_logits(logits_TV, rows, names)
    if "sum_squares" in names:
        exp_TV = exponentials_(logits_TV, peak_T, rows.inverse_temperature)
        found["sum_squares"] = exp_TV.square_().sum(1) / total_T.square()
    return found


def _row_stats_of_logits(logits_TV: Tensor, rows: ScaledRows, names: Sequence[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "mean_logit" in names:
        found["mean_logit"] = logits_TV.mean(1) * rows.inverse_temperature
    if "is_top1" in names:
        found["is_top1"] = logits_TV.argmax(1) == rows.target
    return found


class RowStatsBuffer:
    """The ``row_stats`` of all rows, written a chunk at a time."""

    def __init__(self, names: Sequence[str], like: Tensor) -> None:
        self._values = {name: torch.empty_like(like, dtype=row_stats_dtype(name, like.dtype)) for name in names}

    def write(self, index: slice | tuple[int | slice, ...], found: Mapping[str, Tensor]) -> None:
        for name, values in self._values.items():
            values[index] = found[name]

    def result(self, rows: ScaledRows) -> dict[str, Tensor]:
        return {name: values.masked_fill_(rows.ignored, 0) for name, values in self._values.items()}


def exponentials_(logits_TV: Tensor, peak_T: Tensor, inverse_temperature: float | Tensor) -> Tensor:
    """Compute exp(c) again from the logits, in place."""
    return logits_TV.sub_(peak_T[:, None]).mul_(column(inverse_temperature)).exp_()


def gradient_(
    exp_TV: Tensor,
    rows: ScaledRows,
    statistics: RowStatistics,
    g_logprob_T: Tensor | None,
    g_entropy_T: Tensor | None,
) -> Tensor:
    """Compute dz from exp(c), in place. Rows whose output gradients are 0 get exact zeros."""
    if not exp_TV.shape[1]:
        return exp_TV
    probability_TV = exp_TV.div_(statistics.total[:, None])
    g_logprob_T = torch.zeros_like(statistics.total) if g_logprob_T is None else g_logprob_T * rows.inverse_temperature
    if g_entropy_T is None or statistics.entropy is None:
        gradient_TV = probability_TV.mul_(-g_logprob_T[:, None])
    else:
        g_entropy_T = g_entropy_T * rows.inverse_temperature
        bent_TV = torch.xlogy(probability_TV, probability_TV).mul_(g_entropy_T[:, None])
        factor_T = g_logprob_T + g_entropy_T * statistics.entropy
        gradient_TV = probability_TV.mul_(-factor_T[:, None]).sub_(bent_TV)
    if rows.is_elsewhere is not None:
        g_logprob_T = g_logprob_T.masked_fill(rows.is_elsewhere, 0.0)
    at_target_T1 = gradient_TV.gather(1, rows.target[:, None]) + g_logprob_T[:, None]
    return gradient_TV.scatter_(1, rows.target[:, None], at_target_T1)
