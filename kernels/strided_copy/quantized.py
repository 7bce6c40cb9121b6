"""Copies of matrices that are quantised to float8 (e4m3) on their way, with their scales.

    scale[b] = max |x| over block b / 448          destination = round(x * (1 / scale[b]))

A block is a whole matrix, or 128 x 128 elements of it. The rows of a matrix come from several tensors, such as query,
key and value, or from parts of one. Scales are computed of all of them, so that a matrix is written by one run.

Letters: M matrices (experts) of one tensor, R rows of each, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.triton_target import float8_refusal

BLOCK = 128
FP8_MAX = 448.0
SMALLEST_BLOCK_MAX = 1e-4
"""The maximum of a block counts as this much at least, as in DeepGEMM's cast."""


class RowSegment(NamedTuple):
    """Some rows that follow each other; the elements of a row do, too."""

    first_row: int
    """Counted over the rows of all matrices."""
    num_rows: int
    source: int
    """Index of the tensor in ``sources``."""
    offset: int
    """In elements, from the first of the source."""
    row_stride: int


@dataclass(frozen=True, slots=True)
class QuantizedMatrices:
    """The destination: matrices of one shape that lie one after the other, and their scales.

    Args:
        weight: float8_e4m3fn; its memory is [M, R, C], row after row, whatever its shape is.
        scale: float32, in memory [M], or [M, ceil(R / 128), ceil(C / 128)].
    """

    weight: Tensor
    scale: Tensor
    count: int
    rows: int
    columns: int
    is_blockwise: bool
    dtype: torch.dtype = torch.bfloat16
    """The dtype of the weights that the engine quantises; wider values are rounded to it first."""
    divides_as_ieee: bool = False
    """The inverse of a block's scale is rounded as IEEE has it, as in eager torch; compiled kernels are a bit off."""

    def __post_init__(self) -> None:
        numel = self.count * self.rows * self.columns
        grid = -(-self.rows // BLOCK) * -(-self.columns // BLOCK) if self.is_blockwise else 1
        if self.weight.dtype != torch.float8_e4m3fn or self.weight.numel() != numel:
            raise InvalidInputError(
                f"quantised matrices [{self.count}, {self.rows}, {self.columns}] need as many float8_e4m3fn elements, "
                f"got {self.weight.dtype} {list(self.weight.shape)}"
            )
        if self.scale.dtype != torch.float32 or self.scale.numel() != self.count * grid:
            raise InvalidInputError(
                f"they need {self.count * grid} float32 scales, got {self.scale.dtype} {list(self.scale.shape)}"
            )

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return the memory of weight [M R C] and scale, as vectors."""
        return tuple(  # type: ignore[return-value]
            tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()) for tensor in (self.weight, self.scale)
        )


def group_rows(segments: Sequence[RowSegment], rows: int) -> int:
    """Return the largest divisor of 128 such that each group of so many rows of a matrix lies in one segment."""
    edges = [edge % rows for one in segments for edge in (one.first_row, one.first_row + one.num_rows)]
    return math.gcd(BLOCK, *edges)


def check_segments(segments: Sequence[RowSegment], matrices: QuantizedMatrices) -> None:
    """Raise InvalidInputError unless each row of the matrices is in one segment."""
    at = 0
    for one in sorted(segments):
        if one.first_row != at or one.num_rows < 1:
            raise InvalidInputError(f"a segment begins at row {one.first_row}; the rows before it end at {at}")
        at += one.num_rows
    if at != matrices.count * matrices.rows:
        raise InvalidInputError(f"segments have {at} rows of {matrices.count * matrices.rows}")


class QuantizedCopies:
    """One destination's rows, made ready for many runs.

    Args:
        segments: each row of the destination in one of them.
        sources: float32, bfloat16 or float16, of one dtype.

    Raises:
        InvalidInputError: a row is missing or there twice.
    """

    def __init__(
        self,
        segments: Sequence[RowSegment],
        sources: Sequence[Tensor],
        matrices: QuantizedMatrices,
        *,
        implementation: str | None = None,
    ) -> None:
        check_segments(segments, matrices)
        self._segments, self._sources, self._matrices = list(segments), list(sources), matrices
        device = matrices.weight.device
        query = Query(device.type, torch.uint8, 0, 0)
        chosen = choose("strided_copy", query, implementation).implementation
        is_plain = chosen != "triton" or float8_refusal(query) or any(one.device != device for one in sources)
        self.implementation = "views" if is_plain else "triton"
        self._run = self._plain
        if not is_plain:
            from rlcore.kernels.strided_copy.triton_quantized import TritonQuantizedCopies  # loads Triton

            self._run = TritonQuantizedCopies(self._segments, self._sources, matrices).run

    @torch.no_grad()
    def run(self) -> None:
        """Queue the copies on the current stream of the destination's device."""
        self._run()

    def _plain(self) -> None:
        matrices = self._matrices
        rows = [
            self._sources[one.source]
            .as_strided(
                (one.num_rows, matrices.columns),
                (one.row_stride, 1),
                int(self._sources[one.source].storage_offset()) + one.offset,
            )
            .to(matrices.weight.device, matrices.dtype)
            for one in sorted(self._segments)
        ]
        values_MRC = torch.cat(rows).view(matrices.count, matrices.rows, matrices.columns)
        weight, scale = matrices.flat()
        quantized, scales = (quantized_blocks if matrices.is_blockwise else quantized_whole)(values_MRC)
        weight.copy_(quantized.flatten())
        scale.copy_(scales.flatten())


def quantized_whole(values_MRC: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 values and scales [M], as vLLM's ``scaled_fp8_quant`` does for each matrix."""
    largest_M = values_MRC.abs().amax((1, 2)).float()
    scale_M = largest_M / torch.full_like(largest_M, FP8_MAX)  # by a number, torch multiplies by its reciprocal on GPUs
    scaled = values_MRC.float() * (1.0 / scale_M)[:, None, None]
    scaled.nan_to_num_(nan=FP8_MAX)  # 0 / 0 of a matrix of zeros, as vLLM's kernel has it: times its scale it is 0
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_M


def quantized_blocks(values_MRC: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 values and scales [M, row blocks, column blocks], as vLLM's ``per_block_cast_to_fp8`` does."""
    count, rows, columns = values_MRC.shape
    height, width = -(-rows // BLOCK), -(-columns // BLOCK)
    whole = values_MRC.new_zeros(count, height * BLOCK, width * BLOCK)
    whole[:, :rows, :columns] = values_MRC
    blocks = whole.view(count, height, BLOCK, width, BLOCK)
    largest = blocks.abs().float().amax((2, 4)).clamp(min=SMALLEST_BLOCK_MAX)
    scale = largest * (1.0 / FP8_MAX)
    inverse = (1.0 / scale)[:, :, None, :, None]
    quantized = (blocks.float() * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view_as(whole)
    return quantized[:, :rows, :columns].contiguous(), scale
