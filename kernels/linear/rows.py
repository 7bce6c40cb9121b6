"""``linear_logprob`` and ``linear_loss`` of float32 logits, a chunk of rows at a time, read by ``triton_rows``.

The matrix products are those of the device's library. The kernels read the logits once for the statistics and once for
the gradient, which they write in the dtype of the next product. They serve every dtype but float64, with or without a
softcap, on every device that Triton builds for.

Letters: T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlcore.kernels.autograd.forward_backward import ForwardBackward, Gradients, GradOutput, LogprobOutput
from rlcore.kernels.chunks import joined, row_chunks, rows_per_chunk
from rlcore.kernels.linear.head import HeadGradients, LinearHead, Needs, capped_, rounded
from rlcore.kernels.linear.loss_in_chunks import LossProblem, SummingWork, loss_in_chunks, loss_in_two_passes
from rlcore.kernels.linear.problem import HeadInputs, LinearHeadProblem
from rlcore.kernels.losses.interface import LossOutput
from rlcore.kernels.softmax_rows import RowStatistics, RowStatsBuffer, ScaledRows, row_stats_
from rlcore.kernels.token.triton_rows import row_gradient, row_statistics

_ITEM_BYTES = 2
"""``rows_per_chunk`` counts it three times: a float32 logit, and a gradient of half its size where that is a copy."""


def _forward(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem, *, for_backward: bool
) -> LogprobOutput:
    """Save four numbers a row; the backward computes the logits again."""
    head = LinearHead(weight_VH, bias_V, None)
    parts = []
    numbers = RowStatsBuffer(problem.row_stats, hidden_TH.new_empty(len(hidden_TH), dtype=torch.float32))
    for chunk in _chunks(hidden_TH, weight_VH, problem):
        rows = problem.rows.at(chunk)
        logits_TV = head.logits(rows.zero_ignored_rows(hidden_TH[chunk]))
        found = row_statistics(logits_TV, rows, with_entropy=problem.with_entropy, softcap=problem.softcap)
        parts.append(found)
        if problem.row_stats:
            capped_TV = capped_(logits_TV, problem.softcap)
            numbers.write(chunk, row_stats_(capped_TV, rows, problem.row_stats, found.peak, found.total))
    logprob_T, peak_T, total_T = (joined([getattr(x, name) for x in parts]) for name in ("logprob", "peak", "total"))
    entropies = [x.entropy for x in parts if x.entropy is not None]
    return LogprobOutput(
        logprob_T,
        joined(entropies) if entropies else None,
        (peak_T, total_T),
        row_stats=numbers.result(problem.rows),
    )


def _backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    problem: LinearHeadProblem,
    *,
    needs: Sequence[bool],
    output: LogprobOutput,
    grad_output: GradOutput,
) -> Gradients:
    head = LinearHead(weight_VH, bias_V, None)
    gradients = HeadGradients(head, Needs(*needs), len(hidden_TH))
    saved = (output.logprob, output.entropy, *output.residuals)
    for chunk in _chunks(hidden_TH, weight_VH, problem):
        rows = problem.rows.at(chunk)
        masked_TH = rows.zero_ignored_rows(hidden_TH[chunk])
        logits_TV = head.logits(masked_TH)
        statistics = RowStatistics(*(None if values_T is None else values_T[chunk] for values_T in saved))  # type: ignore[arg-type]
        here = (None if g_T is None else g_T[chunk] for g_T in grad_output)
        out = row_gradient(
            logits_TV, rows, statistics, *here, out=_gradient_buffer(head, logits_TV), softcap=problem.softcap
        )
        gradients.add(chunk, out, None, masked_TH)
    return rounded(gradients.totals(), (hidden_TH, weight_VH, bias_V))


linear_logprob_rows = ForwardBackward(_forward, _backward, num_residuals=2)
"""Logits in float32 in chunks of rows, computed again in the backward."""


def _chunks(hidden_TH: Tensor, weight_VH: Tensor, problem: LinearHeadProblem) -> Iterator[slice]:
    return row_chunks(len(hidden_TH), _rows_within(hidden_TH, weight_VH, problem))


def _rows_within(hidden_TH: Tensor, weight_VH: Tensor, problem: LinearHeadProblem) -> int:
    return rows_per_chunk(len(hidden_TH), len(weight_VH), _ITEM_BYTES, problem.memory_budget_bytes)


def _gradient_buffer(head: LinearHead, logits_TV: Tensor) -> Tensor:
    """Return memory for the gradient in the dtype that ``head`` multiplies: the logits' own if it fits."""
    return logits_TV if logits_TV.dtype == head.operand else torch.empty_like(logits_TV, dtype=head.operand)


class _RowWork(SummingWork):
    """The logits of a chunk, kept until its gradients are known."""

    dtype = torch.float32

    def __init__(self, inputs: HeadInputs, problem: LinearHeadProblem) -> None:
        self._head, needs = LinearHead(inputs.weight, inputs.bias, None), Needs.of(*inputs)
        self._hidden_TH, self._problem = inputs.hidden.detach(), problem
        self._gradients = HeadGradients(self._head, needs, len(inputs.hidden)) if any(needs) else None
        self._last: tuple[slice, ScaledRows, Tensor, Tensor, RowStatistics] | None = None

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        self._last = None  # frees the memory of the chunk before
        rows = self._problem.rows.at(chunk)
        masked_TH = rows.zero_ignored_rows(self._hidden_TH[chunk])
        logits_TV = self._head.logits(masked_TH)
        found = row_statistics(logits_TV, rows, with_entropy=self._problem.with_entropy, softcap=self._problem.softcap)
        self._last = (chunk, rows, masked_TH, logits_TV, found)
        return found.logprob, found.entropy

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        assert self._last is not None and self._gradients is not None
        chunk, rows, masked_TH, logits_TV, found = self._last
        out = _gradient_buffer(self._head, logits_TV)
        row_gradient(logits_TV, rows, found, g_logprob_T, g_entropy_T, out=out, softcap=self._problem.softcap)
        self._gradients.add(chunk, out, None, masked_TH)


def linear_loss_rows(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem, loss: LossProblem
) -> LossOutput:
    """Compute the loss in chunks of rows, or of whole sequences, whose logits fit in the memory budget."""
    inputs, rows = HeadInputs(hidden_TH, weight_VH, bias_V), _rows_within(hidden_TH, weight_VH, problem)
    if loss.exceeds(rows):
        return loss_in_two_passes(linear_logprob_rows, inputs, problem, loss)
    return loss_in_chunks(_RowWork(inputs, problem), inputs, loss, rows)
