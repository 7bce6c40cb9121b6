"""``linear_logprob`` and ``linear_loss`` whose logits stay in the tiles of the product: see ``triton_tiles``.

The forward of the log-probability is one product. It saves the exponentials that fit in the memory budget: all, or
those of a first strip of the vocabulary. The statistics of tiles, 12 bytes for 256 logits until they are merged, count
against the budget too, so a long forward is split into runs of rows (``tile_budget``). The backward makes the
exponentials into the gradient of the logits, in place: three products in all. For the other columns it computes the
logits again, in the same memory, a strip at a time, so that each strip's gradient of the weight is one product over all
rows, rounded once.
A loss is computed in chunks of rows, as in ``linear_loss``; the exponentials of a chunk are its only large temporary.
They may take the budget and the bytes of the gradients, which are allocated in the backward, when the chunks are freed.
Each chunk fewer is one pass fewer over the accumulator of the weight's gradient, on one H200 0.4 ms at 151936 x 2048.
With one chunk the accumulators of weight and bias are not needed. So where the exponentials of all rows take no more
than the budget and those accumulators, there is one chunk, and the exponentials are saved for the backward.

A chunk's gradient of the hidden states is multiplied a wave of tiles at a time: in chunks of 3,328 rows the loss of
65536 x 2048 x 151936 takes 203 ms on one H200, and 212 with a product of the whole chunk; 32768 x 896 takes 51.2 and
52.9, 8192 x 4096 takes 50.8 and 51.0.
A second stream does not hide the pass over the exponentials behind a product: with 2,048 rows of 32768 x 896 x 151936
the pass and the gradient of the hidden states take 1.06 ms at the same time and 1.06 one after the other, 1.16 and 1.17
with that of the weight, 1.18 and 1.18 with the statistics of the next rows, and more with cores of its own.
The gradient of the hidden states from a strip is one product of all rows: linear_logprob in strips of 0.5 GiB, forward
and backward, takes 57.2 ms, and by waves 69.6 (H = 896), 60.7 and 62.3 (H = 4096); a loss of exponentials that were
kept takes 47.3 and 48.1.

Letters: T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcore.kernels.autograd.forward_backward import ForwardBackward, Gradients, GradOutput, LogprobOutput
from rlcore.kernels.chunks import joined, row_chunks
from rlcore.kernels.linear.head import HeadGradients, LinearHead, Needs, Totals
from rlcore.kernels.linear.loss_in_chunks import LossProblem, SummingWork, loss_in_chunks, loss_in_two_passes
from rlcore.kernels.linear.problem import HeadInputs, LinearHeadProblem
from rlcore.kernels.linear.tile_budget import (
    Strip,
    budget_of,
    rows_fitting,
    rows_of_chunks,
    rows_scored_at_once,
    strip_fitting,
)
from rlcore.kernels.linear.triton_tile_gradients import (
    LogitGradientTerms,
    dlogits_from_exponentials,
    dlogits_from_product,
    scaled,
)
from rlcore.kernels.linear.triton_tiles import TILE_V, TileStatistics, pitched, rows_of_a_wave, tile_statistics
from rlcore.kernels.losses.interface import LossOutput
from rlcore.kernels.softmax_rows import ScaledRows

_WIDE_BYTES = 4
"""Bytes of an element of an accumulated gradient: float32."""

_MOST_ROWS_OF_A_SUM = 65536


def _budget(problem: LinearHeadProblem, hidden_TH: Tensor) -> int:
    return budget_of(problem.memory_budget_bytes, len(hidden_TH), hidden_TH.device)


def _forward(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem, *, for_backward: bool
) -> LogprobOutput:
    """Save three numbers a row and, for a backward that may overwrite them, the exponentials that fit."""
    rows, sizes = problem.rows.with_factors(), (len(hidden_TH), len(weight_VH), _budget(problem, hidden_TH))
    masked_TH, weight_VH, bias_V = _aligned(rows.zero_ignored_rows(hidden_TH)), _aligned(weight_VH), _widened(bias_V)
    strip = strip_fitting(*sizes) if for_backward else Strip(0, rows_scored_at_once(*sizes))
    exponentials_TV = _strip_workspace(hidden_TH, strip.num_columns)
    peak_KT = hidden_TH.new_empty(math.ceil(strip.num_columns / TILE_V), len(hidden_TH), dtype=torch.float32)

    def scored(run: slice) -> tuple[Any, ...]:
        found = tile_statistics(
            masked_TH[run],
            weight_VH,
            bias_V,
            rows.at(run),
            with_entropy=problem.with_entropy,
            exponentials_TV=exponentials_TV[run] if for_backward else None,
        )
        peak_KT[:, run] = found.peak_JT[: len(peak_KT)]
        return found.logprob, found.entropy, found.normaliser

    parts = zip(*(scored(run) for run in row_chunks(len(hidden_TH), strip.num_rows)), strict=True)
    logprob_T, entropy_T, normaliser_T = (None if part[0] is None else joined(part) for part in parts)
    assert logprob_T is not None and normaliser_T is not None
    return LogprobOutput(logprob_T, entropy_T, (normaliser_T,), (peak_KT, exponentials_TV) if for_backward else ())


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
    rows = problem.rows.with_factors()
    masked_TH, weight_VH = _aligned(rows.zero_ignored_rows(hidden_TH)), _aligned(weight_VH)
    peak_JT, exponentials_TV = output.workspace or (None, None)
    statistics = TileStatistics(output.logprob, output.entropy, output.residuals[0], peak_JT)  # type: ignore[arg-type]
    terms = LogitGradientTerms.of(rows, statistics, *grad_output)
    gradients = _StripGradients(masked_TH, weight_VH, bias_V, Needs(*needs))
    workspace_TV, done = exponentials_TV, 0
    if workspace_TV is None:
        strip = strip_fitting(len(masked_TH), len(weight_VH), _budget(problem, masked_TH))
        workspace_TV = _strip_workspace(masked_TH, strip.num_columns)
    else:
        done = workspace_TV.shape[1]
        gradients.add(slice(0, done), dlogits_from_exponentials(workspace_TV, rows, statistics, terms))
    wide_bias_V = _widened(bias_V)
    for columns, out in _strips(workspace_TV.view(torch.bfloat16), done, len(weight_VH)):
        dlogits_from_product(masked_TH, weight_VH, wide_bias_V, columns, rows, statistics, terms, out=out)
        gradients.add(columns, out)
    return gradients.totals()


def _sum_over_rows(a_TV: Tensor, b_TH: Tensor, *, out: Tensor) -> None:
    """Write a^T b to ``out``. Of very many rows those beyond a multiple of 8 are added after the others.

    cuBLAS of CUDA 13.0 leaves out the last of 65,537 and of 131,073 rows where H is 64 or 128 (seen on an H200).
    """
    whole = len(a_TV) - len(a_TV) % 8 if len(a_TV) > _MOST_ROWS_OF_A_SUM else len(a_TV)
    torch.mm(a_TV[:whole].T, b_TH[:whole], out=out)
    if whole < len(a_TV):
        out.addmm_(a_TV[whole:].T, b_TH[whole:])


class _StripGradients:
    """The gradients asked for; strips of the vocabulary are added one after the other."""

    def __init__(self, masked_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needs: Needs) -> None:
        self._masked_TH, self._needs = masked_TH, needs
        self._head = LinearHead(weight_VH, None, None)
        self._hidden_TH: Tensor | None = None
        self._weight_VH = torch.empty_like(weight_VH) if needs.weight else None
        self._bias_V = torch.empty_like(bias_V) if needs.bias and bias_V is not None else None

    def add(self, columns: slice, dlogits_TV: Tensor) -> None:
        head = self._head
        operand_TV = dlogits_TV.to(head.operand)
        if self._needs.hidden:
            self._add_hidden(operand_TV, head.weight_VH[columns])
        if self._weight_VH is not None:
            _sum_over_rows(operand_TV, self._masked_TH, out=self._weight_VH[columns])
        if self._bias_V is not None:
            self._bias_V[columns] = dlogits_TV.sum(0, dtype=head.wide)

    def _add_hidden(self, operand_TV: Tensor, strip_VH: Tensor) -> None:
        if self._hidden_TH is None:
            self._hidden_TH = self._head.product(operand_TV, strip_VH)
        else:
            self._head.accumulate(self._hidden_TH, operand_TV, strip_VH)

    def totals(self) -> Totals:
        hidden_TH = None if self._hidden_TH is None else self._hidden_TH.to(self._masked_TH.dtype)
        return hidden_TH, self._weight_VH, self._bias_V


linear_logprob_tiled = ForwardBackward(_forward, _backward, num_residuals=1)
"""It stores no logits, but exponentials of as many columns as the budget holds, then their gradient in that memory."""


class _TiledWork(SummingWork):
    """The exponentials of a chunk's logits, then the gradient in their place; one buffer serves all chunks."""

    dtype = torch.float32

    def __init__(self, inputs: HeadInputs, problem: LinearHeadProblem, rows_per_chunk: int) -> None:
        hidden_TH, weight_VH, bias_V = inputs
        self._rows, self._with_entropy = problem.rows.with_factors(), problem.with_entropy
        self._hidden_TH = hidden_TH.detach()
        self._weight_VH, self._bias_V = _aligned(weight_VH.detach()), _widened(bias_V)
        needs = Needs.of(*inputs)
        has_gradients = any(needs)
        head = LinearHead(self._weight_VH, None, None)
        wave = rows_of_a_wave(hidden_TH.shape[1], hidden_TH.device)
        self._gradients = HeadGradients(head, needs, len(hidden_TH), product_rows=wave) if has_gradients else None
        self._buffer_TV = pitched(rows_per_chunk if has_gradients else 0, len(weight_VH), hidden_TH, torch.float16)
        self._last: tuple[slice, ScaledRows, Tensor, Tensor, TileStatistics] | None = None

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        self._last = None
        rows = self._rows.at(chunk)
        masked_TH = _aligned(rows.zero_ignored_rows(self._hidden_TH[chunk]))
        exponentials_TV = None if self._gradients is None else self._buffer_TV[: len(masked_TH)]
        found = tile_statistics(
            masked_TH,
            self._weight_VH,
            self._bias_V,
            rows,
            with_entropy=self._with_entropy,
            exponentials_TV=exponentials_TV,
        )
        if exponentials_TV is not None:
            self._last = (chunk, rows, masked_TH, exponentials_TV, found)
        return found.logprob, found.entropy

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        assert self._last is not None and self._gradients is not None
        chunk, rows, masked_TH, exponentials_TV, found = self._last
        terms = LogitGradientTerms.of(rows, found, g_logprob_T, g_entropy_T)
        dlogits_TV = dlogits_from_exponentials(exponentials_TV, rows, found, terms)
        self._gradients.add(chunk, dlogits_TV, None, masked_TH)

    @staticmethod
    def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return scaled(total, factor, dtype)


def _unused_accumulator_bytes(inputs: HeadInputs) -> int:
    """Return the bytes of the accumulators that one strip of all columns does not need.

    It needs that of the hidden states.
    """
    return sum(x.numel() * _WIDE_BYTES for x in _differentiated(inputs) if x is not inputs.hidden)


def _gradient_bytes(inputs: HeadInputs) -> int:
    return sum(x.nbytes for x in _differentiated(inputs))


def _differentiated(inputs: HeadInputs) -> list[Tensor]:
    pairs = zip(inputs, Needs.of(*inputs), strict=True)
    return [x for x, is_needed in pairs if x is not None and is_needed]


def linear_loss_tiled(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem, loss: LossProblem
) -> LossOutput:
    """Compute the loss in chunks whose exponentials fit in the memory budget and the bytes of the gradients."""
    inputs, num_rows = HeadInputs(hidden_TH, weight_VH, bias_V), max(len(hidden_TH), 1)
    unused_bytes, budget = _unused_accumulator_bytes(inputs), _budget(problem, hidden_TH)
    if unused_bytes and num_rows <= rows_fitting(budget, len(weight_VH), beside=unused_bytes):
        kept = replace(problem, memory_budget_bytes=budget + unused_bytes)
        return loss_in_two_passes(linear_logprob_tiled, inputs, kept, loss)
    fitting = rows_fitting(budget, len(weight_VH), beside=_gradient_bytes(inputs))
    if loss.exceeds(fitting):
        return loss_in_two_passes(linear_logprob_tiled, inputs, problem, loss)
    rows = rows_of_chunks(len(hidden_TH), fitting)
    return loss_in_chunks(_TiledWork(inputs, problem, rows), inputs, loss, rows)


def _strip_workspace(hidden_TH: Tensor, num_columns: int) -> Tensor:
    """Return memory for exponentials of all rows, or for their gradients."""
    return pitched(len(hidden_TH), num_columns, hidden_TH, torch.float16)


def _strips(workspace_TV: Tensor, first_v: int, vocab_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield nearly equal runs of the vocabulary from ``first_v`` on, each with its workspace, which the next reuses."""
    num_strips = math.ceil((vocab_size - first_v) / workspace_TV.shape[1])
    if num_strips == 0:
        return
    width = math.ceil(math.ceil((vocab_size - first_v) / num_strips) / TILE_V) * TILE_V
    for start in range(first_v, vocab_size, width):
        stop = min(start + width, vocab_size)
        yield slice(start, stop), workspace_TV[:, : stop - start]


def _aligned(x_TH: Tensor) -> Tensor:
    """Return ``x_TH`` as the copy engine needs it: contiguous, from a multiple of 16 bytes."""
    x_TH = x_TH.contiguous()
    return x_TH.clone() if x_TH.data_ptr() % 16 else x_TH


def _widened(bias_V: Tensor | None) -> Tensor | None:
    return None if bias_V is None else bias_V.detach().float().contiguous()
