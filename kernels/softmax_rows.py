"""Softmax of rows of logits, without ever holding more than the rows at hand.

    c_v = sharpness * (z_v - max z)      a = sum_v exp(c_v)      p_v = exp(c_v) / a
    logprob = c_y - ln a                 entropy = -sum_v p_v ln p_v = ln a - (1/a) sum_v exp(c_v) c_v
    dz_v = sharpness * (g_logprob (1[v=y] - p_v) - g_entropy p_v (ln p_v + entropy))

z are the logits, y the target, sharpness = 1 / temperature (times the model's logit scale), g_* the upstream
gradients. The maximum is taken off before the division by the temperature: the difference of two close floats
is exact, so a large common offset costs no accuracy. exp(c) ln exp(c) is 0 where c = -inf (``xlogy``), so
columns may be masked with -inf. Functions whose names end in ``_`` overwrite their first argument.

Letters: T rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import torch
from torch import Tensor


class Logprobs(NamedTuple):
    """What ``token_logprob`` and ``linear_logprob`` return."""

    logprob: Tensor
    """Shape of the targets, float32 (float64 for float64 inputs), nats, <= 0; 0 in ignored rows."""
    entropy: Tensor | None
    """The same of the whole distribution, nats, >= 0; None unless asked for."""


class RowStatistics(NamedTuple):
    """All that the gradient of a row needs besides its logits."""

    logprob: Tensor
    entropy: Tensor | None
    peak: Tensor
    """max_v z_v"""
    total: Tensor
    """a"""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmaxes and of accumulated gradients: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def column(values: float | Tensor) -> float | Tensor:
    """A per-row factor shaped to multiply rows."""
    return values[..., None] if isinstance(values, Tensor) else values


@dataclass(frozen=True)
class Rows:
    """What belongs to each row besides its logits."""

    marked: Tensor
    """The targets, int64 or int32, with ``ignore_index`` in ignored rows."""
    ignore_index: int
    sharpness: float | Tensor
    is_elsewhere: Tensor | None = None
    """The target is none of the columns at hand, and ``target`` is 0; None: all are at hand."""

    @functools.cached_property
    def is_ignored(self) -> Tensor:
        return self.marked == self.ignore_index

    @functools.cached_property
    def target(self) -> Tensor:
        """int64; 0 in ignored rows."""
        return self.marked.masked_fill(self.is_ignored, 0).long()

    def at(self, index: slice | tuple[int | slice, ...]) -> Rows:
        sharpness = self.sharpness[index] if isinstance(self.sharpness, Tensor) else self.sharpness
        is_elsewhere = None if self.is_elsewhere is None else self.is_elsewhere[index]
        part = Rows(self.marked[index], self.ignore_index, sharpness, is_elsewhere)
        # found once for all chunks: each small kernel of a chunk keeps its products waiting
        vars(part).update(is_ignored=self.is_ignored[index], target=self.target[index])
        return part

    def reshaped(self, shape: Sequence[int]) -> Rows:
        sharpness = self.sharpness.reshape(shape) if isinstance(self.sharpness, Tensor) else self.sharpness
        return replace(self, marked=self.marked.reshape(shape), sharpness=sharpness)

    def known(self, values_TX: Tensor) -> Tensor:
        """``values_TX`` with ignored rows 0: whatever they held, NaN included, cannot reach a sum."""
        return values_TX.masked_fill(self.is_ignored[..., None], 0.0)

    @overload
    def known_vector(self, values_T: Tensor) -> Tensor: ...
    @overload
    def known_vector(self, values_T: None) -> None: ...
    def known_vector(self, values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T.masked_fill(self.is_ignored, 0.0)


def statistics_(logits_TV: Tensor, rows: Rows, *, with_entropy: bool) -> RowStatistics:
    """Statistics of rows of wide logits, which are overwritten with exp(c)."""
    peak_T = logits_TV.amax(1)
    centred_TV = logits_TV.sub_(peak_T[:, None]).mul_(column(rows.sharpness))
    chosen_T = centred_TV.gather(1, rows.target[:, None]).squeeze(1)
    exp_TV = centred_TV.exp_()
    total_T = exp_TV.sum(1)
    log_total_T = total_T.log()
    entropy_T = None
    if with_entropy:
        entropy_T = log_total_T - torch.xlogy(exp_TV, exp_TV).sum(1) / total_T
    return RowStatistics(chosen_T - log_total_T, entropy_T, peak_T, total_T)


def exponentials_(logits_TV: Tensor, peak_T: Tensor, sharpness: float | Tensor) -> Tensor:
    """exp(c) once more from the logits, in their place."""
    return logits_TV.sub_(peak_T[:, None]).mul_(column(sharpness)).exp_()


def gradient_(
    exp_TV: Tensor,
    rows: Rows,
    statistics: RowStatistics,
    g_logprob_T: Tensor | None,
    g_entropy_T: Tensor | None,
) -> Tensor:
    """dz from exp(c), in its place; exact zeros in rows whose upstream gradients are 0."""
    if not exp_TV.shape[1]:
        return exp_TV
    probability_TV = exp_TV.div_(statistics.total[:, None])
    g_logprob_T = torch.zeros_like(statistics.total) if g_logprob_T is None else g_logprob_T * rows.sharpness
    if g_entropy_T is None or statistics.entropy is None:
        gradient_TV = probability_TV.mul_(-g_logprob_T[:, None])
    else:
        g_entropy_T = g_entropy_T * rows.sharpness
        bent_TV = torch.xlogy(probability_TV, probability_TV).mul_(g_entropy_T[:, None])
        factor_T = g_logprob_T + g_entropy_T * statistics.entropy
        gradient_TV = probability_TV.mul_(-factor_T[:, None]).sub_(bent_TV)
    if rows.is_elsewhere is not None:
        g_logprob_T = g_logprob_T.masked_fill(rows.is_elsewhere, 0.0)
    at_target_T1 = gradient_TV.gather(1, rows.target[:, None]) + g_logprob_T[:, None]
    return gradient_TV.scatter_(1, rows.target[:, None], at_target_T1)
