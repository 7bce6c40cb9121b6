"""``linear_logprob`` and ``linear_loss`` of float32 logits, a chunk of rows at a time, read by ``triton_rows``.

The products are the device's own; the kernels read the logits once for the statistics and once for the gradient,
which they write in the dtype that is multiplied next. For every dtype but float64, with or without a softcap, on
every device that Triton builds for.

Letters: T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlcore.kernels.autograd.loss_in_chunks import LossOutput, LossTask, SummingWork, loss_in_chunks
from rlcore.kernels.autograd.scorer import Gradients, Scorer, Scores, Upstream
from rlcore.kernels.chunks import row_chunks, rows_per_chunk
from rlcore.kernels.linear.head import HeadGradients, LinearHead, Needs, Totals, rounded
from rlcore.kernels.linear.problem import HeadInputs, HeadTask
from rlcore.kernels.linear.scored_loss import scored_loss
from rlcore.kernels.softmax_rows import Rows, RowStatistics
from rlcore.kernels.token.triton_rows import row_gradient, row_statistics

_ITEM_BYTES = 2
"""``rows_per_chunk`` counts three: a float32 logit, and a gradient of half its size where that is a copy."""


def _forward(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, task: HeadTask, *, for_backward: bool
) -> Scores:
    """Keeps four numbers a row."""
    head = LinearHead(weight_VH, bias_V, None)
    parts = []
    for chunk in _chunks(hidden_TH, weight_VH, task):
        rows = task.rows.at(chunk)
        logits_TV = head.logits(rows.known(hidden_TH[chunk]))
        parts.append(row_statistics(logits_TV, rows, with_entropy=task.with_entropy, softcap=task.softcap))
    logprob_T, peak_T, total_T = (torch.cat([getattr(x, name) for x in parts]) for name in ("logprob", "peak", "total"))
    entropies = [x.entropy for x in parts if x.entropy is not None]
    return Scores(logprob_T, torch.cat(entropies) if entropies else None, (peak_T, total_T))


def _backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    task: HeadTask,
    *,
    needs: Sequence[bool],
    scores: Scores,
    upstream: Upstream,
) -> Gradients:
    head = LinearHead(weight_VH, bias_V, None)
    gradients = HeadGradients(head, Needs(*needs), len(hidden_TH))
    saved = (scores.logprob, scores.entropy, *scores.residuals)
    for chunk in _chunks(hidden_TH, weight_VH, task):
        rows = task.rows.at(chunk)
        known_TH = rows.known(hidden_TH[chunk])
        logits_TV = head.logits(known_TH)
        statistics = RowStatistics(*(None if values_T is None else values_T[chunk] for values_T in saved))  # type: ignore[arg-type]
        here = (None if g_T is None else g_T[chunk] for g_T in upstream)
        out = row_gradient(logits_TV, rows, statistics, *here, out=_room(head, logits_TV), softcap=task.softcap)
        gradients.add(chunk, out, None, known_TH)
    return rounded(gradients.totals(), (hidden_TH, weight_VH, bias_V))


linear_logprob_rows = Scorer(_forward, _backward, num_residuals=2)
"""Logits in float32 in chunks of rows, made again in the backward."""


def _chunks(hidden_TH: Tensor, weight_VH: Tensor, task: HeadTask) -> Iterator[slice]:
    return row_chunks(len(hidden_TH), _rows_within(hidden_TH, weight_VH, task))


def _rows_within(hidden_TH: Tensor, weight_VH: Tensor, task: HeadTask) -> int:
    return rows_per_chunk(len(hidden_TH), len(weight_VH), _ITEM_BYTES, task.memory_budget_bytes)


def _room(head: LinearHead, logits_TV: Tensor) -> Tensor:
    """For the gradient, in the dtype that ``head`` multiplies; in place of the logits where that is theirs."""
    return logits_TV if logits_TV.dtype == head.operand else torch.empty_like(logits_TV, dtype=head.operand)


class _RowWork(SummingWork):
    """A chunk's logits, until its gradients are known."""

    dtype = torch.float32

    def __init__(self, inputs: HeadInputs, task: HeadTask) -> None:
        self._head, needs = LinearHead(inputs.weight, inputs.bias, None), Needs.of(*inputs)
        self._hidden_TH, self._task = inputs.hidden.detach(), task
        self._gradients = HeadGradients(self._head, needs, len(inputs.hidden)) if any(needs) else None
        self._last: tuple[slice, Rows, Tensor, Tensor, RowStatistics] | None = None

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        self._last = None  # room for this chunk
        rows = self._task.rows.at(chunk)
        known_TH = rows.known(self._hidden_TH[chunk])
        logits_TV = self._head.logits(known_TH)
        found = row_statistics(logits_TV, rows, with_entropy=self._task.with_entropy, softcap=self._task.softcap)
        self._last = (chunk, rows, known_TH, logits_TV, found)
        return found.logprob, found.entropy

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        assert self._last is not None and self._gradients is not None
        chunk, rows, known_TH, logits_TV, found = self._last
        out = _room(self._head, logits_TV)
        row_gradient(logits_TV, rows, found, g_logprob_T, g_entropy_T, out=out, softcap=self._task.softcap)
        self._gradients.add(chunk, out, None, known_TH)

    def totals(self) -> Totals:
        assert self._gradients is not None
        return self._gradients.totals()


def linear_loss_rows(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, task: HeadTask, loss: LossTask
) -> LossOutput:
    """Chunks of rows, or of whole sequences, whose logits the memory budget holds."""
    inputs, rows = HeadInputs(hidden_TH, weight_VH, bias_V), _rows_within(hidden_TH, weight_VH, task)
    if loss.exceeds(rows):
        return scored_loss(linear_logprob_rows, inputs, task, loss)
    return loss_in_chunks(_RowWork(inputs, task), inputs, loss, rows)
