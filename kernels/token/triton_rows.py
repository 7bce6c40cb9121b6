# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Softmax of rows in Triton: statistics in one read of the logits, their gradient in one read and one write.

    k = s log2(e)      c_v = k (z_v - max z)      a = sum_v 2^c_v      b = sum_v 2^c_v c_v
    logprob = ln2 (c_y - log2 a)      entropy = ln2 (log2 a - b / a)      p_v = 2^c_v / a
    dz_v = p_v (slant + bend c_v) + [v = y] s g_logprob
    slant = -s (g_logprob + g_entropy (entropy - ln2 log2 a))      bend = -s ln2 g_entropy

This is ``softmax_rows`` in base 2; s is the inverse temperature. The maximum is found while summing (Milakov and
Gimelshein 2018, arXiv 1805.02867): each lane, a run of neighbouring columns, keeps its own maximum, so that nothing
crosses threads before the end of a row.

Letters: T rows, V vocabulary, L lanes, N batch entries where the rows of the logits do not flatten.
Order of this file: statistics kernel, gradient kernel, what launches them, ``token_logprob``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.kernels import tile_choices
from rlcore.kernels.autograd.forward_backward import ForwardBackward, Gradients, GradOutput, LogprobOutput
from rlcore.kernels.operands import check_values, is_checked_on_device, kernels_verdict
from rlcore.kernels.softmax_rows import RowStatistics, RowStatsBuffer, ScaledRows, row_stats_
from rlcore.kernels.token.logprob import wide_chunks
from rlcore.kernels.token.problem import LogitsProblem
from rlcore.kernels.triton_programs import columns, launches, limits

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-200.0)
"""Columns of -inf are lifted to this exponent: 2^-200 is 0 in float32, and 0 times it is no NaN."""

_READ_BYTES = 16
"""A lane's run of columns is one read of a thread, so that the threads of a warp read neighbouring memory."""
_COLUMN_BYTES = 60
"""All tensors that either kernel holds of one column take at most so many: with a softcap, a mask, wide logits."""


def statistics_tile(device_type: str, itemsize: int = 2) -> dict[str, int]:
    """Return the compile options for logits of this size. Where a device limits tiles they have one lane.

    The mask of one run is a length, so that the device's compiler need not read the columns that it hides.
    """
    if (found := limits(device_type)) is None:
        return {**tile_choices.tile("statistics of rows", device_type), "RUN": _READ_BYTES // itemsize}
    return {"LANES": 1, "RUN": columns(found, _COLUMN_BYTES)}


def gradient_tile(device_type: str) -> dict[str, int]:
    if (found := limits(device_type)) is None:
        return dict(tile_choices.tile("gradient of rows", device_type))
    return {"BLOCK": columns(found, _COLUMN_BYTES)}


@triton.jit
def _program(first):
    """Return the number of this program among those of all launches."""
    number = tl.program_id(0)
    if first is not None:
        number += first
    return number


@triton.jit
def _tanh(x):
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    return tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)


@triton.jit(do_not_specialize=["ignore_index"])
def _statistics_kernel(
    logits, keep, target, ignore_index, inverse_temperature_T, logprob, entropy, peak, total, is_valid,
    stride_n, stride_t, stride_v, rows_per_entry, V, inverse_temperature, softcap, first,
    WITH_ENTROPY: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    t = _program(first).to(tl.int64)  # T * V overflows int32 at 2^31 elements
    y = tl.load(target + t)
    if y == ignore_index:
        tl.store(logprob + t, 0.0)
        if WITH_ENTROPY:
            tl.store(entropy + t, 0.0)
        return
    if is_valid is not None:
        tl.store(is_valid, False, mask=(y < 0) | (y >= V))
    y = tl.minimum(tl.maximum(y, 0), V - 1)
    row = logits + (t // rows_per_entry) * stride_n + (t % rows_per_entry) * stride_t
    if inverse_temperature_T is not None:
        inverse_temperature = tl.load(inverse_temperature_T + t)
    k = inverse_temperature * LOG2_E
    z_y = tl.load(row + y.to(tl.int64) * stride_v).to(tl.float32)  # its wait is over when the sums are there
    column = tl.arange(0, LANES)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    m = tl.full([LANES], -float("inf"), tl.float32)
    a = tl.zeros([LANES], tl.float32)
    b = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * RUN):
        v = start + column
        strip = row + tl.cast(start, tl.int64) * stride_v  # as T * V does V * stride_v, of logits that were transposed
        z = tl.load(strip + column * stride_v, mask=v < V, other=-float("inf")).to(tl.float32)
        if softcap is not None:
            z = tl.where(v < V, softcap * _tanh(z / softcap), -float("inf"))
        if keep is not None:
            z = tl.where(tl.load(keep + t * V + v, mask=v < V, other=0) != 0, z, -float("inf"))
        higher = tl.maximum(m, tl.max(z, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        c = (z - base[:, None]) * k
        if WITH_ENTROPY:
            c = tl.maximum(c, LEAST, propagate_nan=tl.PropagateNan.ALL)
        shift = tl.maximum((m - base) * k, LEAST)
        e = tl.exp2(c)
        if WITH_ENTROPY:
            b = (b + a * shift) * tl.exp2(shift) + tl.sum(e * c, 1)
        a = a * tl.exp2(shift) + tl.sum(e, 1)
        m = higher
    highest = tl.max(m, 0)
    shift = tl.maximum((m - highest) * k, LEAST)
    a_row = tl.sum(a * tl.exp2(shift), 0)
    if softcap is not None:
        z_y = softcap * _tanh(z_y / softcap)
    if keep is not None:
        z_y = tl.where(tl.load(keep + t * V + y) != 0, z_y, -float("inf"))
    tl.store(logprob + t, ((z_y - highest) * k - tl.log2(a_row)) * LN_2)
    tl.store(peak + t, highest)
    tl.store(total + t, a_row)
    if WITH_ENTROPY:
        b_row = tl.sum((b + a * shift) * tl.exp2(shift), 0)
        tl.store(entropy + t, tl.maximum((tl.log2(a_row) - b_row / a_row) * LN_2, 0.0, tl.PropagateNan.ALL))


@triton.jit(do_not_specialize=["ignore_index"])
def _gradient_kernel(
    logits, keep, target, ignore_index, inverse_temperature_T, entropy, peak, total, g_logprob, g_entropy, gradient,
    stride_n, stride_t, stride_v, out_stride_n, out_stride_t, out_stride_v, rows_per_entry, V, inverse_temperature,
    softcap, first, BLOCK: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(V, BLOCK)
    program = _program(first)
    t = (program // num_blocks).to(tl.int64)
    start = ((program % num_blocks) * BLOCK).to(tl.int64)
    column = tl.arange(0, BLOCK)
    v = start.to(tl.int32) + column
    row = logits + (t // rows_per_entry) * stride_n + (t % rows_per_entry) * stride_t + start * stride_v
    out = gradient + (t // rows_per_entry) * out_stride_n + (t % rows_per_entry) * out_stride_t
    out += start * out_stride_v + column * out_stride_v
    # All numbers of the row are asked for at once: where each waits for the one before, so do the logits.
    y = tl.load(target + t)
    a = tl.load(total + t)
    highest = tl.load(peak + t)
    g = 0.0
    g_bar = 0.0
    if g_logprob is not None:
        g = tl.load(g_logprob + t)
    if g_entropy is not None:
        g_bar = tl.load(g_entropy + t)
        mean = tl.load(entropy + t)
    if inverse_temperature_T is not None:
        inverse_temperature = tl.load(inverse_temperature_T + t)
    is_known = y != ignore_index  # what an ignored row was given may be anything
    g, g_bar = tl.where(is_known, g, 0.0), tl.where(is_known, g_bar, 0.0)
    if (g == 0.0) & (g_bar == 0.0):  # exact zeros without reading, whatever the row holds
        tl.store(out, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=v < V)
        return
    z = tl.load(row + column * stride_v, mask=v < V, other=-float("inf")).to(tl.float32)
    if softcap is not None:
        tanh = _tanh(z / softcap)
        z, slope = softcap * tanh, 1.0 - tanh * tanh
    if keep is not None:
        is_kept = tl.load(keep + t * V + v, mask=v < V, other=0) != 0
        z = tl.where(is_kept, z, -float("inf"))
    c = (z - highest) * (inverse_temperature * LOG2_E)
    c = tl.maximum(c, LEAST, propagate_nan=tl.PropagateNan.ALL)
    slant = g
    if g_entropy is not None:
        slant += g_bar * (mean - tl.log2(a) * LN_2)
    per_exponential = -inverse_temperature / a
    dz = slant * per_exponential
    if g_entropy is not None:
        dz += g_bar * LN_2 * per_exponential * c
    dz *= tl.exp2(c)
    at = (y - start).to(tl.int32)
    if (at >= 0) & (at < BLOCK):  # of one block in many
        dz += tl.where(column == at, g * inverse_temperature, 0.0)
    if softcap is not None:
        dz *= slope
    if keep is not None:
        dz = tl.where(is_kept, dz, 0.0)
    tl.store(out, dz.to(gradient.dtype.element_ty), mask=v < V)


def row_statistics(
    logits: Tensor,
    rows: ScaledRows,
    *,
    with_entropy: bool,
    keep_mask: Tensor | None = None,
    softcap: float | None = None,
    is_valid: Tensor | None = None,
) -> RowStatistics:
    """Compute statistics of logits [T, V] or [N, L, V] of any strides, before the softcap.

    ``rows`` and the result are flat. Ignored rows have logprob and entropy 0, and no peak and total. The kernel writes
    False to ``is_valid``, a bool scalar, if a target is no token.
    """
    rows_per_entry, (stride_n, stride_t, stride_v) = _row_layout(logits)
    factor_T, factor = _inverse_temperatures(rows)
    logprob_T, peak_T, total_T = (logits.new_empty(rows.labels.shape, dtype=torch.float32) for _ in range(3))
    entropy_T = torch.empty_like(logprob_T) if with_entropy else None
    for launch in launches(len(logprob_T), logits.device.type):
        _statistics_kernel[(launch.num_programs,)](
            logits, keep_mask, rows.labels, rows.ignore_index, factor_T,
            logprob_T, entropy_T, peak_T, total_T, is_valid,
            stride_n, stride_t, stride_v, rows_per_entry, logits.shape[-1], factor, softcap,
            launch.first, WITH_ENTROPY=with_entropy, **statistics_tile(logits.device.type, logits.itemsize),
        )  # fmt: skip
    return RowStatistics(logprob_T, entropy_T, peak_T, total_T)


def row_gradient(
    logits: Tensor,
    rows: ScaledRows,
    statistics: RowStatistics,
    g_logprob_T: Tensor | None,
    g_entropy_T: Tensor | None,
    *,
    out: Tensor,
    keep_mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write dz to ``out``, which may be ``logits``. Rows that are ignored or whose ``g_*`` are 0 get exact zeros."""
    rows_per_entry, strides = _row_layout(logits)
    factor_T, factor = _inverse_temperatures(rows)
    V = logits.shape[-1]
    tile = gradient_tile(logits.device.type)
    for launch in launches(len(rows.labels) * triton.cdiv(V, tile["BLOCK"]), logits.device.type):
        _gradient_kernel[(launch.num_programs,)](
            logits, keep_mask, rows.labels, rows.ignore_index, factor_T,
            statistics.entropy, statistics.peak, statistics.total, _dense(g_logprob_T), _dense(g_entropy_T), out,
            *strides, *_row_layout(out)[1], rows_per_entry, V, factor, softcap,
            launch.first, **tile,
        )  # fmt: skip
    return out


def _row_layout(logits: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Return the number of rows of a batch entry, and the strides of entry, row and column."""
    if logits.dim() == 2:
        return max(len(logits), 1), (0, *logits.stride())  # type: ignore[return-value]
    return max(logits.shape[1], 1), logits.stride()  # type: ignore[return-value]


def _inverse_temperatures(rows: ScaledRows) -> tuple[Tensor | None, float]:
    """Return one for each row, or None and one for all."""
    found = rows.inverse_temperature
    return (found, 1.0) if isinstance(found, Tensor) else (None, found)


def _dense(values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T.contiguous()


def _forward(logits: Tensor, problem: LogitsProblem, *, for_backward: bool) -> LogprobOutput:
    """Save four numbers a row."""
    rows, keep_mask = _flat_operands(problem)
    is_valid = kernels_verdict(logits.device) if is_checked_on_device(logits) else None
    found = row_statistics(logits, rows, with_entropy=problem.with_entropy, keep_mask=keep_mask, is_valid=is_valid)
    if is_valid is not None:
        check_values(is_valid, lambda: f"targets must be token ids in [0, {logits.shape[-1]}), or ignore_index")
    if problem.rows.labels.dim() > 1:
        shape = problem.rows.labels.shape
        found = RowStatistics(*(None if values is None else values.view(shape) for values in found[:4]))  # type: ignore[arg-type]
    numbers = _row_stats(logits, problem, found) if problem.row_stats else {}
    return LogprobOutput(found.logprob, found.entropy, (found.peak, found.total), row_stats=numbers)


def _row_stats(logits: Tensor, problem: LogitsProblem, found: RowStatistics) -> dict[str, Tensor]:
    """Compute them in plain torch, a wide copy of some rows at a time."""
    numbers = RowStatsBuffer(problem.row_stats, found.logprob)
    for index, chunk_TV, rows in wide_chunks(logits, problem):
        numbers.write(index, row_stats_(chunk_TV, rows, problem.row_stats, found.peak[index], found.total[index]))
    return numbers.result(problem.rows)


def _backward(
    logits: Tensor,
    problem: LogitsProblem,
    *,
    needs: Sequence[bool],
    output: LogprobOutput,
    grad_output: GradOutput,
) -> Gradients:
    rows, keep_mask = _flat_operands(problem)
    statistics = RowStatistics(*(_flat(values) for values in (output.logprob, output.entropy, *output.residuals)))  # type: ignore[arg-type]
    out = logits.detach() if problem.inplace_backward else torch.empty_like(logits)
    g_logprob_T, g_entropy_T = map(_flat, grad_output)
    return (row_gradient(logits, rows, statistics, g_logprob_T, g_entropy_T, out=out, keep_mask=keep_mask),)


def _flat(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.reshape(-1)


def _flat_operands(problem: LogitsProblem) -> tuple[ScaledRows, Tensor | None]:
    rows = problem.rows
    if not (rows.labels.dim() == 1 and rows.labels.is_contiguous()):
        rows = rows.reshaped((-1,))
        rows = replace(rows, labels=rows.labels.contiguous())
    if isinstance(rows.inverse_temperature, Tensor):
        rows = replace(rows, inverse_temperature=rows.inverse_temperature.reshape(-1).contiguous())
    return rows, None if problem.keep_mask is None else problem.keep_mask.contiguous()


token_logprob_triton = ForwardBackward(_forward, _backward, num_residuals=2, checks_targets=True)
"""The forward reads the logits once; the backward reads them once and writes the gradient once."""
