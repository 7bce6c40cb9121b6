"""The exponentials of logits, two bytes each, and the statistics of their tiles, that a memory budget holds.

Without a budget of the caller it is ``DEFAULT_BUDGET_BYTES``, and less where the device is short of memory.

Letters: T rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rlcore.errors import InvalidInputError
from rlcore.kernels.chunks import DEFAULT_BUDGET_BYTES
from rlcore.kernels.linear.triton_tiles import TILE_T, TILE_V
from rlcore.planned import planned_device
from rlcore.registry import specs_of

_ITEM_BYTES = 2
"""Bytes of an exponential, float16, and of a logit's gradient, bfloat16."""
_STATISTICS_BYTES = 12
"""Bytes for one row of a tile: three statistics, until they are merged."""
_PEAK_BYTES = 4
"""Bytes for one row of a tile: the statistic that is kept with the exponentials."""
_STATISTICS_SHARE = 8
"""Where a budget does not hold all exponentials, one part in so many is for statistics. More rows at once are no
faster, and columns that are not kept are computed again."""
_ROUND_ROWS = 1024
"""A product of so many rows leaves few cores idle: 8192 x 4096 x 151936 takes 45.6 ms on one H200 in chunks of 3072,
46.6 in three even ones of 2816, 47.6 in four of 2048. Where they do not fit, chunks in multiples of a tile are as good:
65536 x 2048 x 151936 takes 201.5 ms in chunks of 3328, 196.5 in those of 5120, 195.5 in those of 6144; with 32768 rows
of 896 it is 53.2 in chunks of 3328, 52.4 in those of 4096, and 57.4 in those of 4224."""


_SHORT_SHARE = 4
"""A budget that nobody gave takes at most one part in so many of the memory that is free."""
_SHORT_BYTES = 300 << 20
"""It is no less than this, nor than so many tiles of all rows: below, strips get narrow and products slow."""
_FEWEST_TILES = 8


class Strip(NamedTuple):
    """The first columns of the vocabulary, and the rows of each pass over it."""

    num_columns: int
    """Columns whose exponentials are kept of all rows at once: all of the vocabulary, or whole tiles."""
    num_rows: int
    """Rows whose statistics of tiles are in memory at once."""


def budget_of(given_bytes: int | None, num_rows: int, device: torch.device) -> int:
    """Return the budget that the caller gave, or the one that the device has room for."""
    if given_bytes is not None:
        return given_bytes
    tiles_bytes = _FEWEST_TILES * num_rows * (_ITEM_BYTES * TILE_V + _PEAK_BYTES)
    least = max(_SHORT_BYTES, tiles_bytes)
    if least >= DEFAULT_BUDGET_BYTES:
        return DEFAULT_BUDGET_BYTES
    free = free_bytes(device)
    return DEFAULT_BUDGET_BYTES if free is None else min(max(free // _SHORT_SHARE, least), DEFAULT_BUDGET_BYTES)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free, those of torch's cache too; None for a host, while a graph is captured, and where
    a step is planned, which takes the most.
    """
    if planned_device(device) is not None or any(spec.is_host for spec in specs_of(device.type)):
        return None
    module = torch.get_device_module(device)
    if module.is_current_stream_capturing():
        return None
    free: int = module.mem_get_info(device)[0]
    stats = module.memory_stats(device)  # once: torch flattens all of them for each number that is asked for
    return free + int(stats.get("reserved_bytes.all.current", 0)) - int(stats.get("allocated_bytes.all.current", 0))


def rows_fitting(budget_bytes: int, vocab_size: int, beside: int = 0) -> int:
    """Return the number of rows whose exponentials fit in the budget and in ``beside``, bytes that are free meanwhile.

    Raises:
        InvalidInputError: the budget does not hold one row.
    """
    row_bytes = _row_bytes(vocab_size)
    if budget_bytes < row_bytes:
        raise InvalidInputError(
            f"memory_budget_bytes={budget_bytes} does not hold one row of {vocab_size} logits; the least is {row_bytes}"
        )
    return (budget_bytes + beside) // row_bytes


def rows_of_chunks(num_rows: int, fitting: int) -> int:
    """Return the rows of chunks of nearly equal size, a round number if possible."""
    if num_rows <= fitting:
        return max(num_rows, 1)
    even = math.ceil(num_rows / math.ceil(num_rows / fitting))
    for unit in (_ROUND_ROWS, TILE_T):
        rows = math.ceil(even / unit) * unit
        if rows <= fitting:
            return rows
    return fitting // TILE_T * TILE_T or even


def strip_fitting(num_rows: int, vocab_size: int, budget_bytes: int) -> Strip:
    """Return the columns whose exponentials are kept of all rows, and the rows that are scored at once.

    Raises:
        InvalidInputError: the budget does not hold a tile of them and the statistics of a tile's rows.
    """
    num_rows, row_bytes = max(num_rows, 1), _STATISTICS_BYTES * _num_tiles(vocab_size)
    if num_rows * _row_bytes(vocab_size) <= budget_bytes:
        return Strip(vocab_size, num_rows)
    column_bytes = num_rows * (_ITEM_BYTES * TILE_V + _PEAK_BYTES)  # of a tile
    least = column_bytes + min(num_rows, TILE_T) * row_bytes
    if budget_bytes < least:
        raise InvalidInputError(
            f"memory_budget_bytes={budget_bytes} does not hold a strip of {TILE_V} logits of each of {num_rows} rows; "
            f"the least is {least}. implementation='chunked' needs less"
        )
    statistics_bytes = min(budget_bytes // _STATISTICS_SHARE, budget_bytes - column_bytes)
    rows = rows_of_chunks(num_rows, max(statistics_bytes // row_bytes, TILE_T))
    num_tiles = (budget_bytes - rows * row_bytes) // column_bytes
    return Strip(min(num_tiles * TILE_V, vocab_size), rows)


def rows_scored_at_once(num_rows: int, vocab_size: int, budget_bytes: int) -> int:
    """Return the rows that are scored at once where no exponentials are kept."""
    rows_fitting(budget_bytes, vocab_size)  # raises as where they are kept
    return rows_of_chunks(num_rows, budget_bytes // (_STATISTICS_BYTES * _num_tiles(vocab_size)))


def _row_bytes(vocab_size: int) -> int:
    return _ITEM_BYTES * vocab_size + (_STATISTICS_BYTES + _PEAK_BYTES) * _num_tiles(vocab_size)


def _num_tiles(vocab_size: int) -> int:
    return math.ceil(vocab_size / TILE_V)
