# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The gradient of logits whose softmax is in tiles: see ``triton_tiles``.

    dz_v = p_v (slant + bend log2 p_v) + [v = y] jump      jump = s g_logprob
    slant = -s (g_logprob + g_entropy entropy)             bend = -s ln2 g_entropy

s is the inverse temperature. p_v comes from the stored exponentials, and the gradient takes their place; or the product
is computed again, and its logits stay in registers.

Letters: T rows, H hidden size, V vocabulary, J tiles of V.
Order of this file: kernels, the functions that launch them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from rlcore.kernels.linear.triton_tiles import (
    INTERPRETS,
    LEAST,
    LN_2,
    LOG2_E,
    TILE_H,
    TILE_T,
    TILE_V,
    TileStatistics,
    descriptor,
    grid,
    num_cores,
    product_tile,
    tile_place,
    tile_product,
)
from rlcore.kernels.softmax_rows import ScaledRows

LOG2_SCALE = tl.constexpr(15.0)
"""The exponent of ``triton_tiles.SCALE``."""
TINY = tl.constexpr(2.0**-25)
"""Below the least float16, so that a logarithm is finite where an exponential is 0."""

_IN_PLACE = {"BV": TILE_V, "TILES": 16, "num_warps": 4}
_TARGET_ROWS = _TERM_ROWS = 256
_SCALED_BLOCK = 4096


@triton.jit
def _dlogits_kernel(
    hidden, weight, bias, inverse_temperature_T, normaliser, slant, bend, dlogits, T, V, H,
    NUM_PROGRAMS: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BT) * tl.cdiv(V, BV), NUM_PROGRAMS, flatten=True):
        t0, v0 = tile_place(tile, T, V, BT, BV, GROUP)
        z = tile_product(hidden, weight, bias, t0, v0, V, H, BT, BV, BH)
        t = t0 + tl.arange(0, BT)
        k = tl.load(inverse_temperature_T + t, mask=t < T, other=0.0) * LOG2_E
        c = z * k[:, None] - tl.load(normaliser + t, mask=t < T, other=0.0)[:, None]
        if bias is not None:
            c = tl.maximum(c, LEAST, propagate_nan=tl.PropagateNan.ALL)
        dz = tl.load(slant + t, mask=t < T, other=0.0)[:, None]
        if bend is not None:
            dz += tl.load(bend + t, mask=t < T, other=0.0)[:, None] * c
        dlogits.store([t0, v0], (dz * tl.exp2(c)).to(tl.bfloat16))


@triton.jit
def _log2(x):
    """Return log2 in one instruction; its error is 2^-22, that of float16 2^-12. tl.log2 is a long polynomial."""
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
def _terms_kernel(
    is_ignored, inverse_temperature_T, entropy, g_logprob, g_entropy, slant, bend, jump, T, BT: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    is_row = t < T
    is_known = tl.load(is_ignored + t, mask=is_row, other=1) == 0
    k = tl.load(inverse_temperature_T + t, mask=is_known, other=0.0)
    g = tl.zeros([BT], tl.float32)
    if g_logprob is not None:
        g += tl.load(g_logprob + t, mask=is_known, other=0.0) * k
    tl.store(jump + t, g, mask=is_row)
    if bend is not None:
        g_bar = tl.load(g_entropy + t, mask=is_known, other=0.0) * k
        tl.store(bend + t, -g_bar * LN_2, mask=is_row)
        g += g_bar * tl.load(entropy + t, mask=is_known, other=0.0)
    tl.store(slant + t, -g, mask=is_row)


@triton.jit
def _scaled_kernel(x, factor, out, num_elements, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < num_elements) * tl.load(factor)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < num_elements)


class LogitGradientTerms(NamedTuple):
    """The terms of the gradient of a row's logits; 0 in ignored rows. Vectors [T]."""

    slant: Tensor
    bend: Tensor | None
    jump: Tensor
    """Added at the target."""

    @staticmethod
    def of(
        rows: ScaledRows, statistics: TileStatistics, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None
    ) -> LogitGradientTerms:
        given = (None if g_T is None else g_T.contiguous() for g_T in (g_logprob_T, g_entropy_T))
        slant_T, jump_T = (torch.empty_like(statistics.logprob) for _ in range(2))
        bend_T = None if g_entropy_T is None or statistics.entropy is None else torch.empty_like(slant_T)
        _terms_kernel[(triton.cdiv(len(slant_T), _TERM_ROWS),)](
            rows.ignored, rows.inverse_temperature, statistics.entropy, *given, slant_T, bend_T, jump_T, len(slant_T),
            BT=_TERM_ROWS,
        )  # fmt: skip
        return LogitGradientTerms(slant_T, bend_T, jump_T)


def dlogits_from_exponentials(
    exponentials_TV: Tensor, rows: ScaledRows, statistics: TileStatistics, terms: LogitGradientTerms
) -> Tensor:
    """Compute dz as bfloat16, in the memory of the exponentials."""
    T, V = exponentials_TV.shape
    dlogits_TV = exponentials_TV.view(torch.bfloat16)
    stride = dlogits_TV.stride(0)
    _exponentials_to_dlogits_kernel[(T * triton.cdiv(V, TILE_V * _IN_PLACE["TILES"]),)](
        exponentials_TV, dlogits_TV, statistics.peak_JT, statistics.normaliser, terms.slant, terms.bend,
        stride, T, V, **_IN_PLACE,
    )  # fmt: skip
    _set_target(dlogits_TV, 0, rows, statistics, terms)
    return dlogits_TV


def dlogits_from_product(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    columns: slice,
    rows: ScaledRows,
    statistics: TileStatistics,
    terms: LogitGradientTerms,
    *,
    out: Tensor,
) -> Tensor:
    """Write dz of the vocabulary rows in ``columns`` to ``out`` [T, columns], bfloat16 and ``pitched``."""
    (T, H), strip_VH = hidden_TH.shape, weight_VH[columns]
    if T == 0:
        return out
    _dlogits_kernel[grid(T, len(strip_VH), hidden_TH.device)](
        descriptor(hidden_TH, TILE_T, TILE_H), descriptor(strip_VH, TILE_V, TILE_H),
        None if bias_V is None else bias_V[columns],
        rows.inverse_temperature, statistics.normaliser, terms.slant, terms.bend,
        descriptor(out, TILE_T, TILE_V), T, len(strip_VH), H, NUM_PROGRAMS=num_cores(hidden_TH.device),
        **product_tile(hidden_TH.device.type),
    )  # fmt: skip
    _set_target(out, columns.start, rows, statistics, terms)
    return out


def _set_target(
    dlogits_TV: Tensor, first_v: int, rows: ScaledRows, statistics: TileStatistics, terms: LogitGradientTerms
) -> None:
    T, num_v = dlogits_TV.shape
    _target_kernel[(triton.cdiv(T, _TARGET_ROWS),)](
        dlogits_TV, rows.target, statistics.logprob, terms.slant, terms.bend, terms.jump,
        dlogits_TV.stride(0), first_v, num_v, T, BT=_TARGET_ROWS,
    )  # fmt: skip


def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total``, dense, times a scalar, rounded once to ``dtype``.

    It is one pass over the memory; torch takes three times as long.
    """
    out = torch.empty_like(total, dtype=dtype)
    _scaled_kernel[(triton.cdiv(total.numel(), _SCALED_BLOCK),)](
        total, factor.to(total.dtype), out, total.numel(), BLOCK=_SCALED_BLOCK, num_warps=8
    )
    return out
