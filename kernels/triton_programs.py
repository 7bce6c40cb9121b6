"""How work is cut into programs on a device that limits them: how much one holds, how many a launch has.

Where a device states no limits, tiles are those that were laid out for it, and a launch has all programs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from rlcore.registry import specs_of
from rlcore.types import ProgramLimits


class GridSlice(NamedTuple):
    num_programs: int
    first: int | None
    """Number of its first program among those of all launches; None if this is all of them."""


@functools.cache
def limits(device_type: str) -> ProgramLimits | None:
    """What the plugin of the device says of its programs. It is ``tensor.device.type`` that names the device."""
    return next((spec.program_limits for spec in specs_of(device_type) if spec.program_limits is not None), None)


def columns(found: ProgramLimits, column_bytes: int) -> int:
    """The most columns of a tile, a power of two; ``column_bytes`` is what all tensors of a program take of one."""
    return 1 << (found.tile_bytes // column_bytes).bit_length() - 1


def launches(num_programs: int, device_type: str) -> Iterator[GridSlice]:
    """None for no programs, else one, or as few as the device needs."""
    found = limits(device_type)
    most = num_programs if found is None else found.num_programs
    for first in range(0, num_programs, most or 1):
        yield GridSlice(min(most, num_programs - first), first if num_programs > most else None)
