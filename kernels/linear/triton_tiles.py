# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Hidden states times the output weight in tiles, with the softmax where a tile's logits are: in registers.

    z = h W^T + b      k = sharpness log2(e)      in base 2, for a tile of 256 columns of a row:
    m = k max z        c_v = k z_v - m            a = sum_v 2^c_v      d = sum_v 2^c_v c_v

Three kernels run this product. One keeps (m, a, d) of each tile, which a small one merges into the statistics of
the row (for any reference R: a = sum_j a_j 2^(m_j - R), d = sum_j 2^(m_j - R) (d_j + (m_j - R) a_j)). The same can
also store 2^c as float16 times 2^15: 12 bits that hold down to 2^-29 of the tile's maximum, a quarter of the
traffic of float32 logits; ``dlogits_from_exponentials`` turns them into the gradient in their place. The third
computes the logits again and stores their gradient, once the statistics of the row are known:

    dz_v = p_v (slant + bend log2 p_v) + [v = y] sharpness g_logprob
    slant = -sharpness (g_logprob + g_entropy entropy)      bend = -sharpness ln2 g_entropy

Logits are float32 and never rounded. The target's own column is computed in float32 from the log-probability.
A program walks over tiles, those of 16 x 128 rows against one strip of the weight, so that both stay in cache.

Letters: T rows, H hidden size, V vocabulary, J tiles of V.
Order of this file: the product, its epilogues, the small kernels, what launches them.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from rlcore.kernels.softmax_rows import Rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-200.0)
"""Logits are -inf only by the bias: they are lifted to this exponent, where 2^c is 0 and 0 times c is no NaN."""
BOTTOM = tl.constexpr(-1e20)
"""The logit of columns beyond V, and the least maximum of a tile."""
SCALE = tl.constexpr(32768.0)
LOG2_SCALE = tl.constexpr(15.0)
TINY = tl.constexpr(2.0**-25)
"""Below the least float16, so that a logarithm is finite where an exponential is 0."""

INTERPRETS = tl.constexpr(bool(triton.knobs.runtime.interpret))

TILE_T, TILE_V, TILE_H = 128, 256, 64
# On one H200 the product and its statistics take 13.5 to 14 ms for 8192 x 4096 x 151936, within 5 % of the product
# alone; groups of 8 or 32, four stages, and stores by pointer or in halves were no faster.
_MERGE = {"BT": 8, "BJ": 128, "BH": 512, "num_warps": 8}
_IN_PLACE = {"BV": TILE_V, "TILES": 16, "num_warps": 4}
_TARGET_ROWS = _SLOPE_ROWS = 256
_BUSY = 0.95
_PRODUCT = {"BT": TILE_T, "BV": TILE_V, "BH": TILE_H, "GROUP": 16, "num_warps": 8, "num_stages": 3}


@triton.jit
def _place(tile, T, V, BT: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of a tile."""
    num_t = tl.cdiv(T, BT)
    per_group = GROUP * tl.cdiv(V, BV)
    first = tile // per_group * GROUP
    height = min(num_t - first, GROUP)
    return (first + tile % per_group % height) * BT, tile % per_group // height * BV


@triton.jit
def _product(hidden, weight, bias, t0, v0, V, H, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr):
    z = tl.zeros([BT, BV], tl.float32)
    for h0 in range(0, H, BH):
        z = tl.dot(hidden.load([t0, h0]), weight.load([v0, h0]).T, z)
    if bias is not None:
        v = v0 + tl.arange(0, BV)
        z += tl.load(bias + v, mask=v < V, other=0.0)[None, :]
    return z


@triton.jit
def _statistics_kernel(
    hidden, weight, bias, sharpness_T, peak, total, moment, exponentials, first_v, T, V, H,
    IS_EDGE: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BT) * tl.cdiv(V - first_v, BV), NUM_PROGRAMS, flatten=True):
        t0, v0 = _place(tile, T, V - first_v, BT, BV, GROUP)
        v0 += first_v
        z = _product(hidden, weight, bias, t0, v0, V, H, BT, BV, BH)
        t = t0 + tl.arange(0, BT)
        if IS_EDGE:
            z = tl.where((v0 + tl.arange(0, BV) < V)[None, :], z, BOTTOM)
        k = tl.load(sharpness_T + t, mask=t < T, other=1.0) * LOG2_E
        highest = tl.maximum(tl.max(z, 1), BOTTOM)
        m = highest * k
        if bias is None:
            c = z * k[:, None] - m[:, None]
        else:
            # The fused product is not rounded as m is: of a tile that the bias masks, the difference would be 2^40.
            c = tl.maximum((z - highest[:, None]) * k[:, None], LEAST, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(c)
        at = (v0 // BV).to(tl.int64) * T + t
        tl.store(peak + at, m, mask=t < T)
        tl.store(total + at, tl.sum(e, 1), mask=t < T)
        if moment is not None:
            tl.store(moment + at, tl.sum(e * c, 1), mask=t < T)
        if exponentials is not None:
            exponentials.store([t0, v0], (e * SCALE).to(tl.float16))


@triton.jit
def _dlogits_kernel(
    hidden, weight, bias, sharpness_T, normaliser, slant, bend, dlogits, T, V, H,
    NUM_PROGRAMS: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BT) * tl.cdiv(V, BV), NUM_PROGRAMS, flatten=True):
        t0, v0 = _place(tile, T, V, BT, BV, GROUP)
        z = _product(hidden, weight, bias, t0, v0, V, H, BT, BV, BH)
        t = t0 + tl.arange(0, BT)
        k = tl.load(sharpness_T + t, mask=t < T, other=0.0) * LOG2_E
        c = z * k[:, None] - tl.load(normaliser + t, mask=t < T, other=0.0)[:, None]
        if bias is not None:
            c = tl.maximum(c, LEAST, propagate_nan=tl.PropagateNan.ALL)
        dz = tl.load(slant + t, mask=t < T, other=0.0)[:, None]
        if bend is not None:
            dz += tl.load(bend + t, mask=t < T, other=0.0)[:, None] * c
        dlogits.store([t0, v0], (dz * tl.exp2(c)).to(tl.bfloat16))


@triton.jit
def _merge_kernel(
    hidden, weight, bias, target, is_ignored, sharpness_T, peak, total, moment, logprob, entropy, normaliser,
    hidden_stride, weight_stride, T, J, H, BT: tl.constexpr, BJ: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    is_row = t < T
    m = tl.full([BT], -float("inf"), tl.float32)
    a = tl.zeros([BT], tl.float32)
    d = tl.zeros([BT], tl.float32)
    for j0 in range(0, J, BJ):
        j = j0 + tl.arange(0, BJ)
        at = j.to(tl.int64)[:, None] * T + t[None, :]
        inside = (j < J)[:, None] & is_row[None, :]
        m_j = tl.load(peak + at, mask=inside, other=-float("inf"))
        a_j = tl.load(total + at, mask=inside, other=0.0)
        higher = tl.maximum(m, tl.max(m_j, 0))
        shift = tl.maximum(m - higher, LEAST)
        shift_j = tl.maximum(m_j - higher[None, :], LEAST)
        if moment is not None:
            d_j = tl.load(moment + at, mask=inside, other=0.0)
            d = (d + a * shift) * tl.exp2(shift) + tl.sum((d_j + a_j * shift_j) * tl.exp2(shift_j), 0)
        a = a * tl.exp2(shift) + tl.sum(a_j * tl.exp2(shift_j), 0)
        m = higher
    y = tl.load(target + t, mask=is_row, other=0)
    z_y = tl.zeros([BT], tl.float32)
    for h0 in range(0, H, BH):
        h = h0 + tl.arange(0, BH)
        inside = is_row[:, None] & (h < H)[None, :]
        h_y = tl.load(hidden + t[:, None] * hidden_stride + h[None, :], mask=inside, other=0.0).to(tl.float32)
        w_y = tl.load(weight + y[:, None] * weight_stride + h[None, :], mask=inside, other=0.0).to(tl.float32)
        z_y += tl.sum(h_y * w_y, 1)
    if bias is not None:
        z_y += tl.load(bias + y)
    k = tl.load(sharpness_T + t, mask=is_row, other=1.0) * LOG2_E
    a = tl.where(m <= k * BOTTOM, float("nan"), a)  # nothing but -inf, and columns beyond V
    is_known = tl.load(is_ignored + t, mask=is_row, other=1) == 0
    # The target's logit is summed in another order than in the tiles; a log-probability is never above 0.
    c_y = tl.minimum(z_y * k - m - tl.log2(a), 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(logprob + t, tl.where(is_known, c_y * LN_2, 0.0), mask=is_row)
    tl.store(normaliser + t, m + tl.log2(a), mask=is_row)
    if moment is not None:
        tl.store(
            entropy + t,
            tl.where(is_known, tl.maximum((tl.log2(a) - d / a) * LN_2, 0.0, tl.PropagateNan.ALL), 0.0),
            mask=is_row,
        )


@triton.jit
def _log2(x):
    """One instruction, its error 2^-22 beside float16's 2^-12; tl.log2 is a polynomial of many."""
    return tl.log2(x) if INTERPRETS else libdevice.fast_log2f(x)  # which the interpreter lacks


@triton.jit
def _exponentials_to_dlogits_kernel(
    exponentials, dlogits, peak, normaliser, slant, bend, stride, T, V, BV: tl.constexpr, TILES: tl.constexpr
):
    num_blocks = tl.cdiv(V, BV * TILES)
    t = (tl.program_id(0) // num_blocks).to(tl.int64)
    j = tl.program_id(0) % num_blocks * TILES + tl.arange(0, TILES)
    v = j[:, None] * BV + tl.arange(0, BV)[None, :]
    e = tl.load(exponentials + t * stride + v, mask=v < V, other=0.0).to(tl.float32)
    m = tl.load(peak + j.to(tl.int64) * T + t, mask=j * BV < V, other=0.0)
    shift = m - tl.load(normaliser + t) - LOG2_SCALE
    dz = tl.load(slant + t)
    if bend is not None:
        dz += tl.load(bend + t) * (_log2(tl.maximum(e, TINY)) + shift[:, None])
    dz *= e * tl.exp2(shift)[:, None]
    tl.store(dlogits + t * stride + v, dz.to(tl.bfloat16), mask=v < V)


@triton.jit
def _target_kernel(
    dlogits, target, logprob, slant, bend, jump, stride, first_v, num_v, T, BT: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    is_row = t < T
    v = tl.load(target + t, mask=is_row, other=-1) - first_v
    c = tl.load(logprob + t, mask=is_row, other=0.0) * LOG2_E
    dz = tl.load(slant + t, mask=is_row, other=0.0)
    if bend is not None:
        dz += tl.load(bend + t, mask=is_row, other=0.0) * tl.maximum(c, LEAST)
    dz = dz * tl.exp2(c) + tl.load(jump + t, mask=is_row, other=0.0)
    tl.store(dlogits + t * stride + v, dz.to(tl.bfloat16), mask=is_row & (v >= 0) & (v < num_v))


@triton.jit
def _slopes_kernel(
    is_ignored, sharpness_T, entropy, g_logprob, g_entropy, slant, bend, jump, T, BT: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    is_row = t < T
    is_known = tl.load(is_ignored + t, mask=is_row, other=1) == 0
    k = tl.load(sharpness_T + t, mask=is_known, other=0.0)
    g = tl.zeros([BT], tl.float32)
    if g_logprob is not None:
        g += tl.load(g_logprob + t, mask=is_known, other=0.0) * k
    tl.store(jump + t, g, mask=is_row)
    if bend is not None:
        g_bar = tl.load(g_entropy + t, mask=is_known, other=0.0) * k
        tl.store(bend + t, -g_bar * LN_2, mask=is_row)
        g += g_bar * tl.load(entropy + t, mask=is_known, other=0.0)
    tl.store(slant + t, -g, mask=is_row)


class TileStatistics(NamedTuple):
    logprob: Tensor
    entropy: Tensor | None
    """Both 0 in ignored rows."""
    normaliser: Tensor
    """log2 of the sum of exp(sharpness z)"""
    peak_JT: Tensor
    """m of each tile, the reference of the stored exponentials"""


class LogitSlopes(NamedTuple):
    """What the gradient of a row's logits is made of; 0 in ignored rows. Vectors [T]."""

    slant: Tensor
    bend: Tensor | None
    jump: Tensor
    """Added at the target."""

    @staticmethod
    def of(
        rows: Rows, statistics: TileStatistics, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None
    ) -> LogitSlopes:
        given = (None if g_T is None else g_T.contiguous() for g_T in (g_logprob_T, g_entropy_T))
        slant_T, jump_T = (torch.empty_like(statistics.logprob) for _ in range(2))
        bend_T = None if g_entropy_T is None or statistics.entropy is None else torch.empty_like(slant_T)
        _slopes_kernel[(triton.cdiv(len(slant_T), _SLOPE_ROWS),)](
            rows.is_ignored, rows.sharpness, statistics.entropy, *given, slant_T, bend_T, jump_T, len(slant_T),
            BT=_SLOPE_ROWS,
        )  # fmt: skip
        return LogitSlopes(slant_T, bend_T, jump_T)

    def at(self, chunk: slice) -> LogitSlopes:
        return LogitSlopes(*(None if values is None else values[chunk] for values in self))  # type: ignore[arg-type]


def pitched(num_rows: int, num_columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised [rows, columns] of two bytes an element whose rows start at multiples of 16 bytes."""
    pitch = triton.cdiv(num_columns, 8) * 8
    return torch.empty(num_rows, pitch, dtype=dtype, device=like.device)[:, :num_columns]


def tile_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rows: Rows,
    *,
    with_entropy: bool,
    exponentials_TV: Tensor | None = None,
) -> TileStatistics:
    """Statistics of the rows; ``exponentials_TV``, float16 and ``pitched``, also gets 2^(15 + c).

    It has all columns or the first ones, whole tiles of them.
    ``hidden_TH`` and ``weight_VH`` are bfloat16, contiguous, their rows multiples of 16 bytes; ``rows.sharpness`` is a
    tensor, here and below.
    """
    (T, H), V = hidden_TH.shape, len(weight_VH)
    J = triton.cdiv(V, TILE_V)
    new = functools.partial(torch.empty, dtype=torch.float32, device=hidden_TH.device)
    peak_JT, total_JT = new(J, T), new(J, T)
    moment_JT = new(J, T) if with_entropy else None
    logprob_T, normaliser_T = new(T), new(T)
    entropy_T = new(T) if with_entropy else None
    if T == 0:
        return TileStatistics(logprob_T, entropy_T, normaliser_T, peak_JT)
    tiles = _tiles(hidden_TH, TILE_T), _tiles(weight_VH, TILE_V)
    edge = V // TILE_V * TILE_V  # masking the columns beyond V costs time in every tile, so those tiles go apart
    stored = 0 if exponentials_TV is None else exponentials_TV.shape[1]
    for first_v, end_v in itertools.pairwise(sorted({0, min(stored, edge), edge, V})):
        _statistics_kernel[_grid(T, end_v - first_v, hidden_TH.device)](
            *tiles, bias_V, rows.sharpness, peak_JT, total_JT, moment_JT,
            _stored(exponentials_TV) if end_v <= stored else None,
            first_v, T, end_v, H, IS_EDGE=end_v % TILE_V > 0, NUM_PROGRAMS=_num_cores(hidden_TH.device), **_PRODUCT,
        )  # fmt: skip
    _merge_kernel[(triton.cdiv(T, _MERGE["BT"]),)](
        hidden_TH, weight_VH, bias_V, rows.target, rows.is_ignored, rows.sharpness, peak_JT, total_JT, moment_JT,
        logprob_T, entropy_T, normaliser_T, hidden_TH.stride(0), weight_VH.stride(0), T, J, H,
        **_MERGE,
    )  # fmt: skip
    return TileStatistics(logprob_T, entropy_T, normaliser_T, peak_JT)


def dlogits_from_exponentials(
    exponentials_TV: Tensor, rows: Rows, statistics: TileStatistics, slopes: LogitSlopes
) -> Tensor:
    """dz as bfloat16, in the place of the exponentials."""
    T, V = exponentials_TV.shape
    dlogits_TV = exponentials_TV.view(torch.bfloat16)
    stride = dlogits_TV.stride(0)
    _exponentials_to_dlogits_kernel[(T * triton.cdiv(V, TILE_V * _IN_PLACE["TILES"]),)](
        exponentials_TV, dlogits_TV, statistics.peak_JT, statistics.normaliser, slopes.slant, slopes.bend,
        stride, T, V, **_IN_PLACE,
    )  # fmt: skip
    _set_target(dlogits_TV, 0, rows, statistics, slopes)
    return dlogits_TV


def dlogits_from_product(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    columns: slice,
    rows: Rows,
    statistics: TileStatistics,
    slopes: LogitSlopes,
    *,
    out: Tensor,
) -> Tensor:
    """dz of the vocabulary rows in ``columns``, written to ``out`` [T, columns], bfloat16 and ``pitched``."""
    (T, H), strip_VH = hidden_TH.shape, weight_VH[columns]
    if T == 0:
        return out
    _dlogits_kernel[_grid(T, len(strip_VH), hidden_TH.device)](
        _tiles(hidden_TH, TILE_T), _tiles(strip_VH, TILE_V), None if bias_V is None else bias_V[columns],
        rows.sharpness, statistics.normaliser, slopes.slant, slopes.bend, _stored(out), T, len(strip_VH), H,
        NUM_PROGRAMS=_num_cores(hidden_TH.device), **_PRODUCT,
    )  # fmt: skip
    _set_target(out, columns.start, rows, statistics, slopes)
    return out


def _set_target(dlogits_TV: Tensor, first_v: int, rows: Rows, statistics: TileStatistics, slopes: LogitSlopes) -> None:
    T, num_v = dlogits_TV.shape
    _target_kernel[(triton.cdiv(T, _TARGET_ROWS),)](
        dlogits_TV, rows.target, statistics.logprob, slopes.slant, slopes.bend, slopes.jump,
        dlogits_TV.stride(0), first_v, num_v, T, BT=_TARGET_ROWS,
    )  # fmt: skip


def _tiles(x: Tensor, num_rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [num_rows, TILE_H])


def _stored(x_TV: Tensor | None) -> TensorDescriptor | None:
    return None if x_TV is None else TensorDescriptor.from_tensor(x_TV, [TILE_T, TILE_V])


def _grid(num_rows: int, num_columns: int, device: torch.device) -> tuple[int]:
    """A program for each core, or for each tile if those are fewer: then none takes the constant step to a second one.

    With the number of programs for a step, each number of rows would be compiled anew.
    """
    num_tiles: int = triton.cdiv(num_rows, TILE_T) * triton.cdiv(num_columns, TILE_V)
    return (min(_num_cores(device), num_tiles),)


def rows_of_a_wave(num_columns: int, device: torch.device) -> int | None:
    """Rows of a product that is one tile of the device's library for each core; None where many were left idle."""
    across = triton.cdiv(num_columns, TILE_V)
    down = _num_cores(device) // across
    return down * TILE_T if down * across >= _BUSY * _num_cores(device) else None


@functools.cache
def _num_cores(device: torch.device) -> int:
    if INTERPRETS.value:
        return 2
    count: int = torch.get_device_module(device).get_device_properties(device).multi_processor_count
    return count
