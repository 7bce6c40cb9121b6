"""Triton programs on a device that limits them: how much one may hold, how many a launch may have.

Where a device states no limits, tiles are those that were laid out for it, and a launch has all programs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from rlcore.registry import specs_of
from rlcore.types import ProgramLimits


class GridSlice(NamedTuple):
    """The programs of one launch."""

    num_programs: int
    first: int | None
    """Number of its first program among those of all launches; None if there is one launch."""


@functools.cache
def limits(device_type: str) -> ProgramLimits | None:
    """Return the limits that the device's plugin states, or None. The argument is ``tensor.device.type``."""
    return next((spec.program_limits for spec in specs_of(device_type) if spec.program_limits is not None), None)


def columns(found: ProgramLimits, column_bytes: int) -> int:
    """Return the columns of a tile, a power of two; all tensors of a program take ``column_bytes`` for one column."""
    return 1 << (found.tile_bytes // column_bytes).bit_length() - 1


def launches(num_programs: int, device_type: str) -> Iterator[GridSlice]:
    """Yield one launch, or as few as the device needs; none if there are no programs."""
    found = limits(device_type)
    most = num_programs if found is None else found.num_programs
    for first in range(0, num_programs, most or 1):
        yield GridSlice(min(most, num_programs - first), first if num_programs > most else None)
