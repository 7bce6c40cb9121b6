# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Hidden states times the output weight in tiles, with the softmax where a tile's logits are: in registers.

    z = h W^T + b      k = inverse_temperature log2(e)      in base 2, for a tile of 256 columns of a row:
    m = k max z        c_v = k z_v - m      a = sum_v 2^c_v      d = sum_v 2^c_v c_v

One kernel computes the product and stores (m, a, d) of each tile. A small one merges them into the statistics of the
row (for any reference R: a = sum_j a_j 2^(m_j - R), d = sum_j 2^(m_j - R) (d_j + (m_j - R) a_j)). The first can also
store 2^c as float16 times 2^15: 12 bits that are exact down to 2^-29 of the tile's maximum, a quarter of the traffic of
float32 logits. ``triton_tile_gradients`` computes the gradient from them, or computes the logits again.

Logits are float32 and never rounded. The target's own column is computed in float32 from the log-probability.
A program walks over tiles, those of 16 x 128 rows against one strip of the weight, so that both stay in cache.

Letters: T rows, H hidden size, V vocabulary, J tiles of V.
Order of this file: the product, the kernels, the functions that launch them.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlcore.kernels import tile_choices
from rlcore.kernels.softmax_rows import ScaledRows
from rlcore.planned import planned_device

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-200.0)
"""Only the bias makes logits -inf. They are raised to this exponent, where 2^c is 0 and 0 times c is no NaN."""
BOTTOM = tl.constexpr(-1e20)
"""The logit of columns beyond V, and the lower bound of a tile's maximum."""
SCALE = tl.constexpr(32768.0)
"""The factor of stored exponentials: 2^15."""

INTERPRETS = tl.constexpr(bool(triton.knobs.runtime.interpret))

TILE_T, TILE_V, TILE_H = 128, 256, 64
# On one H200 the product and its statistics take 13.5 to 14 ms for 8192 x 4096 x 151936, within 5 % of the product
# alone; groups of 8 or 32, four stages, and stores by pointer or in halves were no faster.
_MERGE = {"BT": 8, "BJ": 128, "BH": 512, "num_warps": 8}
_BUSY = 0.95  # share of the cores
_PRODUCT = {"BT": TILE_T, "BV": TILE_V, "BH": TILE_H, "num_warps": 8, "num_stages": 3}


@triton.jit
def tile_place(tile, T, V, BT: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of a tile."""
    num_t = tl.cdiv(T, BT)
    per_group = GROUP * tl.cdiv(V, BV)
    first = tile // per_group * GROUP
    height = min(num_t - first, GROUP)
    return (first + tile % per_group % height) * BT, tile % per_group // height * BV


@triton.jit
def tile_product(hidden, weight, bias, t0, v0, V, H, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr):
    z = tl.zeros([BT, BV], tl.float32)
    for h0 in range(0, H, BH):
        z = tl.dot(hidden.load([t0, h0]), weight.load([v0, h0]).T, z)
    if bias is not None:
        v = v0 + tl.arange(0, BV)
        z += tl.load(bias + v, mask=v < V, other=0.0)[None, :]
    return z


@triton.jit
def _statistics_kernel(
    hidden, weight, bias, inverse_temperature_T, peak, total, moment, exponentials, first_v, T, V, H,
    IS_EDGE: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BT) * tl.cdiv(V - first_v, BV), NUM_PROGRAMS, flatten=True):
        t0, v0 = tile_place(tile, T, V - first_v, BT, BV, GROUP)
        v0 += first_v
        z = tile_product(hidden, weight, bias, t0, v0, V, H, BT, BV, BH)
        t = t0 + tl.arange(0, BT)
        if IS_EDGE:
            z = tl.where((v0 + tl.arange(0, BV) < V)[None, :], z, BOTTOM)
        k = tl.load(inverse_temperature_T + t, mask=t < T, other=1.0) * LOG2_E
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
def _merge_kernel(
    hidden, weight, bias, target, is_ignored, inverse_temperature_T, peak, total, moment, logprob, entropy, normaliser,
    hidden_stride, weight_stride, T, J, H, V, BT: tl.constexpr, BJ: tl.constexpr, BH: tl.constexpr,
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
    y = tl.minimum(tl.maximum(y, 0), V - 1)  # of a target that is no token, which is checked later
    z_y = tl.zeros([BT], tl.float32)
    for h0 in range(0, H, BH):
        h = h0 + tl.arange(0, BH)
        inside = is_row[:, None] & (h < H)[None, :]
        h_y = tl.load(hidden + t[:, None] * hidden_stride + h[None, :], mask=inside, other=0.0).to(tl.float32)
        w_y = tl.load(weight + y[:, None] * weight_stride + h[None, :], mask=inside, other=0.0).to(tl.float32)
        z_y += tl.sum(h_y * w_y, 1)
    if bias is not None:
        z_y += tl.load(bias + y)
    k = tl.load(inverse_temperature_T + t, mask=is_row, other=1.0) * LOG2_E
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


class TileStatistics(NamedTuple):
    """Statistics of rows, vectors [T], and of their tiles."""

    logprob: Tensor
    entropy: Tensor | None
    """Both 0 in ignored rows."""
    normaliser: Tensor
    """log2 of the sum of exp(inverse_temperature z)."""
    peak_JT: Tensor
    """m of each tile, the reference of the stored exponentials."""


def pitched(num_rows: int, num_columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised [rows, columns] of two bytes an element, whose rows start at multiples of 16 bytes."""
    pitch = triton.cdiv(num_columns, 8) * 8
    return torch.empty(num_rows, pitch, dtype=dtype, device=like.device)[:, :num_columns]


def tile_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rows: ScaledRows,
    *,
    with_entropy: bool,
    exponentials_TV: Tensor | None = None,
) -> TileStatistics:
    """Compute the statistics of the rows, and write 2^(15 + c) to ``exponentials_TV`` if that is given.

    Args:
        hidden_TH: bfloat16, contiguous; a row is a multiple of 16 bytes. So is ``weight_VH``.
        rows: their inverse temperature is a tensor.
        exponentials_TV: float16 and ``pitched``; it has all columns, or whole tiles of the first ones.
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
    tiles = descriptor(hidden_TH, TILE_T, TILE_H), descriptor(weight_VH, TILE_V, TILE_H)
    # Masking the columns beyond V would take time in every tile, so the tiles with such columns are launched apart.
    edge = V // TILE_V * TILE_V
    num_stored = 0 if exponentials_TV is None else exponentials_TV.shape[1]
    stored_tiles = None if exponentials_TV is None else descriptor(exponentials_TV, TILE_T, TILE_V)
    for first_v, end_v in itertools.pairwise(sorted({0, min(num_stored, edge), edge, V})):
        _statistics_kernel[grid(T, end_v - first_v, hidden_TH.device)](
            *tiles, bias_V, rows.inverse_temperature, peak_JT, total_JT, moment_JT,
            stored_tiles if end_v <= num_stored else None,
            first_v, T, end_v, H, IS_EDGE=end_v % TILE_V > 0, NUM_PROGRAMS=num_cores(hidden_TH.device),
            **product_tile(hidden_TH.device.type),
        )  # fmt: skip
    _merge_kernel[(triton.cdiv(T, _MERGE["BT"]),)](
        hidden_TH, weight_VH, bias_V, rows.target, rows.ignored, rows.inverse_temperature, peak_JT, total_JT, moment_JT,
        logprob_T, entropy_T, normaliser_T, hidden_TH.stride(0), weight_VH.stride(0), T, J, H, V,
        **_MERGE,
    )  # fmt: skip
    return TileStatistics(logprob_T, entropy_T, normaliser_T, peak_JT)


def product_tile(device_type: str) -> dict[str, int]:
    """Return the compile options of products in tiles."""
    return {**_PRODUCT, **tile_choices.tile("product of tiles", device_type)}


def descriptor(x: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """Return the copy engine's view of ``x`` in tiles."""
    return TensorDescriptor.from_tensor(x, [num_rows, num_columns])


def grid(num_rows: int, num_columns: int, device: torch.device) -> tuple[int]:
    """Return one program for each core, or for each tile if there are fewer tiles.

    A program steps from tile to tile by the number of cores, a constant. If it stepped by the number of programs, each
    number of rows would be compiled anew. Where tiles are fewer than cores, no program takes a second step.
    """
    num_tiles: int = triton.cdiv(num_rows, TILE_T) * triton.cdiv(num_columns, TILE_V)
    return (min(num_cores(device), num_tiles),)


def rows_of_a_wave(num_columns: int, device: torch.device) -> int | None:
    """Return the rows of a product that has one tile of the device's library for each core; None if many would idle."""
    across = triton.cdiv(num_columns, TILE_V)
    down = num_cores(device) // across
    return down * TILE_T if down * across >= _BUSY * num_cores(device) else None


def num_cores(device: torch.device) -> int:
    planned = planned_device(device)
    return _num_cores_here(device) if planned is None else planned.cores


@functools.cache
def _num_cores_here(device: torch.device) -> int:
    if INTERPRETS.value:
        return 2
    count: int = torch.get_device_module(device).get_device_properties(device).multi_processor_count
    return count
