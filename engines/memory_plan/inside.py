"""The memory that operators of torch take inside, where no mode sees it, and free before they return.

The sizes are those of their sources, which each function names. Most of it does not make a peak, but where it lies
decides what else finds a place in a segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlcore.engines.memory_plan.ledger import Inside
from rlcore.planned import planned_device

_FLASH_ROWS, _FLASH_COLUMNS = 128, 32
_WARP, _THREADS, _VECTOR, _VALUES, _MOST_VALUES = 32, 512, 4, 16, 256
_THREADS_OF_CORE = 2048
_ROWS_OF_SEGMENT = 10


def _flash_backward(  # noqa: PLR0917  # the operator's arguments
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor, *_: Any
) -> list[int]:
    """Return what the backward of flash attention 2 takes: see ``mha_varlen_bwd`` of its ``flash_api.cpp``.

    The gradient of the queries is summed in float32. Those of keys and values that several heads share are made for
    each head, and added up.
    """
    tokens, heads, width = query.shape
    rows = tokens + _FLASH_ROWS * (len(cu_seq_q) - 1)
    wide = math.ceil(width / _FLASH_COLUMNS) * _FLASH_COLUMNS
    shared = 0 if key.shape[1] == heads else tokens * heads * width * query.element_size()
    return [4 * heads * rows, 4 * rows * heads * wide, shared, shared]


def _flex_backward(grad_out: Tensor, query: Tensor, *_: Any) -> list[int]:
    return [4 * query.shape[1] * query.shape[2]]  # the sum of each row's gradient times output


def _column_sums(summed: Tensor, dims: Sequence[int] | None, *_: Any, **__: Any) -> list[int]:
    """Return the sums of blocks of rows, which the last block adds up: see ``setReduceConfig`` of ``Reduce.cuh``.

    They are many for a gradient of a bias or a norm, which has one value for each of few columns and thousands of rows.
    """
    planned, leading = planned_device(summed.device), list(range(summed.dim() - 1))
    are_columns = leading and sorted(dim % summed.dim() for dim in dims or ()) == leading
    if planned is None or not planned.arch or not are_columns:
        return []
    columns = summed.shape[-1]
    rows = summed.numel() // max(columns, 1)
    vector = next(size for size in (_VECTOR, 2, 1) if columns % size == 0)
    most = _THREADS // vector
    width = min(_WARP, _power_of_two(columns // vector))
    height = min(most // width, _power_of_two(rows))
    width = min(most // height, _power_of_two(columns // vector))
    blocks = math.ceil(columns / vector / width)
    wanted = planned.cores * (_THREADS_OF_CORE // (width * height))
    values = math.ceil(rows / height)  # of a thread
    if rows < min(height * _VALUES, _MOST_VALUES) or values < _MOST_VALUES or blocks > wanted:
        return []
    parts = max(min(math.ceil(wanted / blocks), math.ceil(values / _VALUES)), math.ceil(values / _MOST_VALUES))
    return [4 * columns * parts * width * vector, 4 * blocks] if parts > 1 else []


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above ``number``; 1 for 0."""
    return 1 << max(number.bit_length() - 1, 0)


def _embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, *_: Any) -> list[int]:
    """Return the sums of a few rows of equal tokens each, in float32: see ``EmbeddingBackwardKernel.cu``."""
    planned, tokens, width = planned_device(grad.device), indices.numel(), grad.shape[-1]
    if planned is None or not planned.arch:
        return []
    segments = math.ceil(tokens / _ROWS_OF_SEGMENT) + min(tokens, num_weights)
    return [4 * segments * math.ceil(width / _WARP) * _WARP]


def _softmax_backward(grad: Tensor, *_: Any) -> list[int]:
    """Return the gradient times the result: see ``softmax_backward_cuda_out`` of ``SoftMax.cu``."""
    planned = planned_device(grad.device)
    return [] if planned is None or not planned.arch else [grad.nbytes]


def _exchange(parts: Tensor, *_: Any) -> list[int]:
    return [] if parts.is_contiguous() else [parts.nbytes]  # what is sent lies in one piece


INSIDE: dict[str, Inside] = {
    "torch_attn::_varlen_attn_backward": _flash_backward,
    "rlcore_plan::flex_attention_backward": _flex_backward,
    "aten::sum.dim_IntList": _column_sums,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "rlcore::exchange_parts": _exchange,
}
