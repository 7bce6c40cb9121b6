"""Copies that quantise to float8, against the definition in float64.

The bodies run with every implementation that the device has; test_triton.py runs this file under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.strided_copy.quantized import (
    BLOCK,
    QuantizedCopies,
    QuantizedMatrices,
    RowSegment,
    group_rows,
)
from tests.accuracy import assert_within_rounding, rounding

from . import test_strided_copy as strided

ON_EACH, implementation, rounds_as_torch = strided.ON_EACH, strided.implementation, strided.rounds_as_torch

SHAPES = {
    "fused rows of three tensors": (1, 320, 256, [128, 64, 128]),
    "experts, gate and up apart": (3, 128, 136, [64] * 6),
    "one tensor, no whole blocks": (1, 200, 72, [200]),
    "small groups": (1, 136, 130, [8, 120, 8]),
}


def case(name: str, dtype: torch.dtype, device: Any) -> tuple[list[RowSegment], list[Tensor], Tensor]:
    """Segments, their sources, of which every other one is wider than the rows, and the matrices [M, R, C]."""
    count, rows, columns, sizes = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    segments: list[RowSegment] = []
    sources: list[Tensor] = []
    at = 0
    for number, size in enumerate(sizes):
        wide = columns + 16 * (number % 2)
        scale = 0.02 * 4**number
        source = (torch.randn(size + 1, wide, generator=generator) * scale).to(dtype).to(device.torch_device)
        sources.append(source)
        segments.append(RowSegment(at, size, number, wide, wide))
        at += size
    rows_of = [source[1:, :columns].cpu() for source in sources]
    return segments, sources, torch.cat(rows_of).view(count, rows, columns)


def empty(name: str, is_blockwise: bool, device: Any, dtype: torch.dtype = torch.bfloat16) -> QuantizedMatrices:
    count, rows, columns, _ = SHAPES[name]
    grid = -(-rows // BLOCK) * -(-columns // BLOCK) if is_blockwise else 1
    options: dict[str, Any] = {"device": device.torch_device}
    weight = torch.empty(count, rows, columns, dtype=torch.float8_e4m3fn, **options)
    return QuantizedMatrices(weight, torch.zeros(count * grid, **options), count, rows, columns, is_blockwise, dtype)


@ON_EACH
@pytest.mark.parametrize("is_blockwise", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_scales_are_those_of_the_definition(
    name: str,
    is_blockwise: bool,
    implementation: str,
    rounds_as_torch: bool,
    device: Any,
) -> None:
    dtype = torch.bfloat16 if is_blockwise else torch.float32
    segments, sources, values = case(name, dtype, device)
    matrices = empty(name, is_blockwise, device, dtype)
    copies = QuantizedCopies(segments, sources, matrices, implementation=implementation)
    assert copies.implementation == implementation
    copies.run()
    exact = values.double()
    count, rows, columns = values.shape
    if is_blockwise:
        height, width = -(-rows // BLOCK), -(-columns // BLOCK)
        padded = exact.new_zeros(count, height * BLOCK, width * BLOCK)
        padded[:, :rows, :columns] = exact
        largest = padded.view(count, height, BLOCK, width, BLOCK).abs().amax((2, 4)).clamp(min=1e-4)
        scale = largest / 448
        each = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :rows, :columns]
    else:
        scale = exact.abs().amax((1, 2)) / 448
        each = scale[:, None, None]
    assert_within_rounding(matrices.scale.cpu().view_as(scale), scale, terms=2, what="scales")
    found = matrices.weight.cpu().double()
    quotient = exact / each
    nearest = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    differs = found != nearest
    if not rounds_as_torch:  # the interpreter forgets to carry: what rounds up to a power of two becomes half of it
        is_half = (2 * found == nearest) & (nearest.abs().log2() % 1 == 0)
        is_small = quotient.abs() < 2.0**-6  # nor does it round subnormal ones, which are 2**-9 apart
        is_cut = is_small & ((nearest - found).abs() == 2.0**-9)
        differs &= ~(is_half | is_cut)
    # where a quotient is within rounding of the middle of two numbers, either is right
    from_middle = (quotient - (found + nearest) / 2).abs()
    assert (from_middle <= rounding(4, torch.float32) * quotient.abs())[differs].all(), int(differs.sum())


@ON_EACH
@pytest.mark.parametrize("is_blockwise", [True, False], ids=["blocks", "whole"])
def test_a_second_run_takes_new_values(
    is_blockwise: bool,
    implementation: str,
    device: Any,
) -> None:
    name = "fused rows of three tensors"
    segments, sources, values = case(name, torch.bfloat16, device)
    matrices, other = empty(name, is_blockwise, device), empty(name, is_blockwise, device)
    copies = QuantizedCopies(segments, sources, matrices, implementation=implementation)
    copies.run()
    for source in sources:
        source.mul_(0.5)
    copies.run()
    QuantizedCopies(segments, sources, other, implementation=implementation).run()
    assert torch.equal(matrices.weight.view(torch.uint8), other.weight.view(torch.uint8))
    assert torch.equal(matrices.scale, other.scale)
    assert_within_rounding(matrices.scale.max().cpu(), float(values.abs().max()) / 2 / 448, terms=2)


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")  # of the interpreter
@ON_EACH
@pytest.mark.parametrize("is_blockwise", [True, False], ids=["blocks", "whole"])
def test_a_matrix_of_zeros_stays_one(is_blockwise: bool, implementation: str, device: Any) -> None:
    name = "experts, gate and up apart"
    segments, sources, _ = case(name, torch.bfloat16, device)
    for source in sources[2:4]:  # both parts of the second expert
        source.zero_()
    matrices = empty(name, is_blockwise, device)
    QuantizedCopies(segments, sources, matrices, implementation=implementation).run()
    weights, scales = matrices.weight.float(), matrices.scale.view(3, -1)
    assert (weights[1] * scales[1].max() == 0).all()
    assert (weights[0] * scales[0].max()).any() and (weights[2] * scales[2].max()).any()
    if not is_blockwise:
        assert (weights[1] == 448).all(), "the bits of vLLM's kernel, which divides by 0 as well"


def test_rows_are_in_groups_of_one_source() -> None:
    assert group_rows([RowSegment(0, 256, 0, 0, 1)], 256) == 128
    assert group_rows([RowSegment(0, 64, 0, 0, 1), RowSegment(64, 128, 1, 0, 1)], 192) == 64
    assert group_rows([RowSegment(0, 200, 0, 0, 1)], 200) == 128, "the last group is not full"
    assert group_rows([RowSegment(0, 400, 0, 0, 1)], 200) == 128, "of two matrices"


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([RowSegment(0, 4, 0, 0, 8)], "segments have 4 rows of 6"),
        ([RowSegment(0, 4, 0, 0, 8), RowSegment(3, 3, 0, 0, 8)], "begins at row 3; the rows before it end at 4"),
        ([RowSegment(1, 5, 0, 0, 8)], "begins at row 1; the rows before it end at 0"),
    ],
)
def test_each_row_comes_once(segments: list[RowSegment], message: str) -> None:
    weight, scale = torch.empty(6, 8, dtype=torch.float8_e4m3fn), torch.empty(1)
    with pytest.raises(InvalidInputError, match=message):
        QuantizedCopies(segments, [torch.zeros(6, 8)], QuantizedMatrices(weight, scale, 1, 6, 8, False))
    with pytest.raises(InvalidInputError, match="need 1 float32 scales, got "):
        QuantizedMatrices(weight, torch.empty(2), 1, 6, 8, False)
    with pytest.raises(InvalidInputError, match=r"as many float8_e4m3fn elements, got torch.float32 \[6, 8\]"):
        QuantizedMatrices(torch.empty(6, 8), scale, 1, 6, 8, False)
