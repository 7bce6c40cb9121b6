# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""``QuantizedCopies`` in Triton: each value is read from memory once for blocks, twice for whole matrices.

A program takes 128 x 128 elements. Rows lie in groups, each of which is a part of one source: a table has the address
and the row stride of each group. The maximum and the quantised values come of two passes over the same elements, which
the second time are in the cache.

The quotients are those of the code that makes the weights otherwise. Whole matrices: IEEE divisions, as nvcc compiles
vLLM's kernel. Blocks: a product by 1 / 448 and Triton's division, as Inductor compiles vLLM's function, or an IEEE
division, as it runs uncompiled. One bit of it decides values in the middle of two of float8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.kernels.strided_copy.quantized import (
    BLOCK,
    FP8_MAX,
    SMALLEST_BLOCK_MAX,
    QuantizedMatrices,
    RowSegment,
    group_rows,
)

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NUM_WARPS = 8
_FP8_MAX, _INVERSE_MAX = tl.constexpr(FP8_MAX), tl.constexpr(1.0 / FP8_MAX)
_SMALLEST = tl.constexpr(SMALLEST_BLOCK_MAX)


@triton.jit
def _tile(
    table, group, row, column, rows, columns,
    SOURCE: tl.constexpr, ROUNDED: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Load [rows of a group, columns] in float32; 0 outside the matrix."""
    source = tl.multiple_of(tl.load(table + 2 * group).to(tl.pointer_type(SOURCE)), ALIGNMENT)
    stride = tl.load(table + 2 * group + 1)
    if ALIGNMENT > 1:
        stride = tl.multiple_of(stride, 8)
    lane = tl.arange(0, row.shape[0]).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(source + (lane[:, None] * stride + column[None, :]), mask=inside, other=0.0)
    return values.to(ROUNDED).to(tl.float32)


@triton.jit
def _largest(
    table, first_group, first_row, column, rows, columns,
    SOURCE: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    largest = 0.0
    for part in tl.static_range(SIZE // GROUP):
        row = first_row + part * GROUP + tl.arange(0, GROUP)
        if first_row + part * GROUP < rows:
            values = _tile(table, first_group + part, row, column, rows, columns, SOURCE, ROUNDED, ALIGNMENT)
            largest = tl.maximum(largest, tl.max(tl.max(tl.abs(values), axis=1), axis=0))
    return largest


@triton.jit
def _store_quantized(
    table, first_group, first_row, column, inverse, weight, rows, columns,
    SOURCE: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    for part in tl.static_range(SIZE // GROUP):
        row = first_row + part * GROUP + tl.arange(0, GROUP)
        if first_row + part * GROUP < rows:
            values = _tile(table, first_group + part, row, column, rows, columns, SOURCE, ROUNDED, ALIGNMENT) * inverse
            # 0 / 0 of a matrix of zeros becomes what vLLM's kernel makes of it
            values = tl.where(values == values, values, _FP8_MAX)  # noqa: PLR0124  # False for NaN
            values = tl.minimum(tl.maximum(values, -_FP8_MAX), _FP8_MAX)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            at = row.to(tl.int64)[:, None] * columns + column[None, :]
            tl.store(weight + at, values.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def _blocks_kernel(
    table, weight, scale, rows, columns, row_blocks, groups, IEEE: tl.constexpr,
    SOURCE: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    block, matrix = tl.program_id(1) % row_blocks, (tl.program_id(1) // row_blocks).to(tl.int64)
    first_row = block * SIZE
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    first_group = matrix * groups + first_row // GROUP
    largest = _largest(table, first_group, first_row, column, rows, columns, SOURCE, ROUNDED, GROUP, SIZE, ALIGNMENT)
    own_scale = tl.maximum(largest, _SMALLEST) * _INVERSE_MAX
    tl.store(scale + (matrix * row_blocks + block) * tl.num_programs(0) + tl.program_id(0), own_scale)
    inverse = tl.div_rn(1.0, own_scale) if IEEE else 1.0 / own_scale
    weight += matrix * rows * columns
    _store_quantized(
        table,
        first_group,
        first_row,
        column,
        inverse,
        weight,
        rows,
        columns,
        SOURCE,
        ROUNDED,
        GROUP,
        SIZE,
        ALIGNMENT,
    )


@triton.jit
def _largest_kernel(
    table, largest, rows, columns, row_blocks, groups,
    SOURCE: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    block, matrix = tl.program_id(1) % row_blocks, (tl.program_id(1) // row_blocks).to(tl.int64)
    first_row = block * SIZE
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    first_group = matrix * groups + first_row // GROUP
    found = _largest(table, first_group, first_row, column, rows, columns, SOURCE, ROUNDED, GROUP, SIZE, ALIGNMENT)
    tl.atomic_max(largest + matrix, found.to(tl.int32, bitcast=True))  # of numbers that are not negative


@triton.jit
def _whole_kernel(
    table, largest, weight, scale, rows, columns, row_blocks, groups,
    SOURCE: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    block, matrix = tl.program_id(1) % row_blocks, (tl.program_id(1) // row_blocks).to(tl.int64)
    first_row = block * SIZE
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    own_scale = tl.div_rn(tl.load(largest + matrix).to(tl.float32, bitcast=True), _FP8_MAX)
    tl.store(scale + matrix, own_scale, mask=(block == 0) & (tl.program_id(0) == 0))
    weight += matrix * rows * columns
    first_group = matrix * groups + first_row // GROUP
    inverse = tl.div_rn(1.0, own_scale)
    _store_quantized(
        table, first_group, first_row, column, inverse, weight, rows, columns, SOURCE, ROUNDED, GROUP, SIZE, ALIGNMENT
    )


class TritonQuantizedCopies:
    """It writes the rows of one destination, from sources on its device."""

    def __init__(self, segments: Sequence[RowSegment], sources: Sequence[Tensor], matrices: QuantizedMatrices) -> None:
        self._matrices, self._sources = matrices, sources  # keeps alive the memory that is read and written
        device, group = matrices.weight.device, group_rows(segments, matrices.rows)
        table = _table(segments, sources, matrices, group)
        self._table = torch.from_numpy(table).to(device)
        self._groups = -(-matrices.rows // group)
        self._row_blocks = -(-matrices.rows // BLOCK)
        self._grid = -(-matrices.columns // BLOCK), self._row_blocks * matrices.count
        is_aligned = _is_aligned(table, matrices)
        dtype = sources[segments[0].source].dtype
        self._options = compile_options(dtype, matrices.dtype, group, is_aligned=is_aligned)
        weight, self._scale = matrices.flat()
        self._weight = weight.view(torch.uint8)
        self._largest = None if matrices.is_blockwise else torch.zeros(matrices.count, dtype=torch.int32, device=device)

    def run(self) -> None:
        matrices = self._matrices
        sizes = matrices.rows, matrices.columns, self._row_blocks, self._groups
        with torch.accelerator.device_index(matrices.weight.device.index):
            if self._largest is None:
                is_ieee = matrices.divides_as_ieee
                _blocks_kernel[self._grid](self._table, self._weight, self._scale, *sizes, is_ieee, **self._options)
                return
            self._largest.zero_()
            _largest_kernel[self._grid](self._table, self._largest, *sizes, **self._options)
            _whole_kernel[self._grid](self._table, self._largest, self._weight, self._scale, *sizes, **self._options)


def compile_options(dtype: torch.dtype, rounded: torch.dtype, group: int, *, is_aligned: bool) -> dict[str, Any]:
    """Return the constants of the kernels."""
    return {
        "SOURCE": _TYPES[dtype],
        "ROUNDED": _TYPES[rounded],
        "GROUP": group,
        "SIZE": BLOCK,
        "ALIGNMENT": 16 if is_aligned else 1,
        "num_warps": _NUM_WARPS,
    }


def _table(
    segments: Sequence[RowSegment], sources: Sequence[Tensor], matrices: QuantizedMatrices, group: int
) -> np.ndarray:
    """Return address and row stride of each group of rows, by matrix."""
    ordered = sorted(segments)
    first = np.array([one.first_row for one in ordered])
    size = sources[ordered[0].source].element_size()
    base = np.array([sources[one.source].data_ptr() + one.offset * size for one in ordered])
    stride = np.array([one.row_stride for one in ordered])
    in_matrix = np.arange(0, matrices.rows, group)
    row = (np.arange(matrices.count)[:, None] * matrices.rows + in_matrix).ravel()
    segment = np.searchsorted(first, row, side="right") - 1
    address = base[segment] + (row - first[segment]) * stride[segment] * size
    return np.ascontiguousarray(np.stack([address, stride[segment]], 1).astype(np.int64))


def _is_aligned(table: np.ndarray, matrices: QuantizedMatrices) -> bool:
    """Return True if each row begins at a multiple of 16 bytes, so that it can be read in words of 16."""
    return not ((table[:, 0] % 16).any() or (table[:, 1] % 8).any() or matrices.columns % 16)
