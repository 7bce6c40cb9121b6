"""Chunks of rows: how many rows one has, and which.

A chunk's temporaries are at most three [rows, V] tensors of the softmax's dtype: its exponentials, one for the entropy
or the softcap, one for the products. A chunk is at most a quarter of all rows, so that no tensor of the size of [T, V]
exists, whatever the budget. Chunks are of nearly equal size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError

DEFAULT_BUDGET_BYTES = 2**30
"""The limit where the caller gives no budget: 589 rows of 151,936 float32 logits.

linear_loss, forward and backward, 8192 x 4096 x 151936 bfloat16 on one H200: 127 ms with half of it, 96 ms with it,
84 ms with twice as much.
"""

_TEMPORARIES = 3
_FEWEST_ROWS = 16
"""Chunks of so few rows are not split to get a quarter: a product of fewer rows reads the weight for too little."""


def rows_per_chunk(num_rows: int, vocab_size: int, itemsize: int, budget_bytes: int | None) -> int:
    """Return the rows of a chunk whose temporaries stay within the budget.

    Raises:
        InvalidInputError: the budget does not hold one row.
    """
    fitting = fitting_rows(vocab_size, itemsize, DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes)
    if budget_bytes is not None and fitting == 0:
        raise InvalidInputError(
            f"memory_budget_bytes={budget_bytes} does not hold one row of {vocab_size} logits; "
            f"the least is {_TEMPORARIES * vocab_size * itemsize}"
        )
    return even_rows(num_rows, fitting)


def fitting_rows(vocab_size: int, itemsize: int, budget_bytes: int) -> int:
    """Return the rows whose temporaries fit in the budget; 0 if none does."""
    return budget_bytes // max(_TEMPORARIES * vocab_size * itemsize, 1)


def even_rows(num_rows: int, fitting: int) -> int:
    """Return the rows of chunks of nearly equal size, of at most ``fitting`` rows and a quarter of all."""
    most = max(1, min(fitting, max(_FEWEST_ROWS, math.ceil(num_rows / 4))))
    return math.ceil(num_rows / max(1, math.ceil(num_rows / most))) or 1


def row_chunks(num_rows: int, rows: int) -> Iterator[slice]:
    """Yield runs of ``rows``; one empty run if there are no rows, so that outputs keep their form."""
    for start in range(0, max(num_rows, 1), rows):
        yield slice(start, min(start + rows, num_rows))


def joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Return the values of all chunks; of a single one as they are, for each small launch keeps the host busy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def batched_row_chunks(shape: Sequence[int], rows: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield runs of the last dimension of ``shape``, for each index of the leading ones.

    So no copy is needed where strides do not let the dimensions be flattened into one.
    """
    *leading, num_rows = shape
    for position in itertools.product(*map(range, leading)):
        for run in row_chunks(num_rows, rows):
            yield (*position, run)


def sequence_chunks(cu_seqlens: Sequence[int], rows: int) -> Iterator[tuple[slice, list[int]]]:
    """Yield runs of whole sequences of at most ``rows`` rows, and their cu_seqlens. No sequence may be longer."""
    first = 0
    for end in range(1, len(cu_seqlens)):
        is_last = end == len(cu_seqlens) - 1
        if is_last or cu_seqlens[end + 1] - cu_seqlens[first] > rows:
            start = cu_seqlens[first]
            yield slice(start, cu_seqlens[end]), [edge - start for edge in cu_seqlens[first : end + 1]]
            first = end
    if len(cu_seqlens) == 1:
        yield slice(0, 0), [0]
