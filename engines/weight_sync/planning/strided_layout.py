"""The elements of a storage numbered by digits, so that strided regions of it can be compared.

With the strides of two regions as 1 = s_0 | s_1 | s_2 ... (each divides the next), element x has the digits
(x mod s_1) / s_0, (x mod s_2) / s_1, ... A region is a few boxes, a range for each digit, and boxes are intersected and
subtracted digit by digit. A region is an end of a copy: along a digit the other end moves by a fixed step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class NotNestedError(Exception):
    """Strides that do not divide each other, or a region that overlaps itself: it cannot be told what meets what."""


class End(NamedTuple):
    """One end of a copy, and for each of its dimensions the step of the other end."""

    offset: int
    dims: tuple[tuple[int, int, int], ...]
    """(stride, size, step of the other end), narrow strides first."""
    free: tuple[tuple[int, int], ...]
    """(size, step of the other end) where this end stays."""
    other: int


class Box(NamedTuple):
    """A range of each digit."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    step: tuple[int, ...]
    """Of the other end, along each digit."""
    other: int
    """The other end of the element at ``start``."""
    free: tuple[tuple[int, int], ...]

    def at(self, start: Sequence[int]) -> int:
        """The other end of the element at these digits."""
        return self.other + sum((a - b) * step for a, b, step in zip(start, self.start, self.step, strict=True))

    def narrowed(self, digit: int, start: int, end: int) -> Box:
        starts = (*self.start[:digit], start, *self.start[digit + 1 :])
        sizes = (*self.sizes[:digit], end - start, *self.sizes[digit + 1 :])
        return Box(starts, sizes, self.step, self.at(starts), self.free)


class Range(NamedTuple):
    start: tuple[int, ...]
    sizes: tuple[int, ...]


def pairs_of_boxes(left: End, right: End) -> Iterator[tuple[Box, Box]]:
    """``left`` is where something is written, so that it cannot stay."""
    radix = radix_of(left, right)
    rights = list(boxes_of(right, radix))
    return ((box, other) for box in boxes_of(left, radix) for other in rights)


def radix_of(*ends: End) -> list[int]:
    """The strides of the digits. Raises NotNestedError."""
    strides = sorted({1, *(stride for end in ends for stride, _, _ in end.dims)})
    if any(wide % narrow for narrow, wide in itertools.pairwise(strides)):
        raise NotNestedError(f"regions with strides {strides}, which do not divide each other")
    for end in ends:
        extent = 0
        for stride, size, _ in end.dims:
            if stride <= extent:
                raise NotNestedError(f"a region that overlaps itself: (stride, size, ...) {end.dims}")
            extent += stride * (size - 1)
    return strides


def boxes_of(end: End, radix: list[int]) -> Iterator[Box]:
    """A region as disjoint boxes: it is split where a dimension carries from a digit to the next."""
    for place, (stride, size, step) in enumerate(end.dims):
        digit = radix.index(stride)
        if digit + 1 == len(radix):
            continue
        limit = radix[digit + 1] // stride
        begin = end.offset // stride % limit
        if begin + size <= limit:
            continue
        others = end.dims[:place] + end.dims[place + 1 :]
        whole = 0 if begin else size // limit
        head = whole * limit or limit - begin
        first = ((stride, limit, step), (stride * limit, whole, step * limit)) if whole else ((stride, head, step),)
        tail = ((stride, size - head, step),) if size > head else None
        yield from boxes_of(end._replace(dims=_sorted(*others, *first)), radix)
        if tail:
            moved = end._replace(offset=end.offset + head * stride, other=end.other + head * step)
            yield from boxes_of(moved._replace(dims=_sorted(*others, *tail)), radix)
        return
    yield _box(end, radix)


def _sorted(*dims: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    return tuple(sorted(dim for dim in dims if dim[1] > 1))


def _box(end: End, radix: list[int]) -> Box:
    start, rest = [], end.offset
    for stride in reversed(radix):
        start.append(rest // stride)
        rest %= stride
    sizes, steps = [1] * len(radix), [0] * len(radix)
    for stride, size, step in end.dims:
        digit = radix.index(stride)
        sizes[digit], steps[digit] = size, step
    return Box(tuple(start[::-1]), tuple(sizes), tuple(steps), end.other, end.free)


def common_range(one: Box, other: Box) -> Range | None:
    """The elements of both boxes."""
    start = tuple(map(max, one.start, other.start))
    sizes = tuple(
        min(a + m, b + n) - begin
        for a, m, b, n, begin in zip(one.start, one.sizes, other.start, other.sizes, start, strict=True)
    )
    return Range(start, sizes) if min(sizes) > 0 else None


def remainder(box: Box, hole: Box) -> Iterator[Box]:
    """A box without another one, as disjoint boxes."""
    common = common_range(box, hole)
    if common is None:
        yield box
        return
    for digit, (start, size) in enumerate(zip(common.start, common.sizes, strict=True)):
        low, high = box.start[digit], box.start[digit] + box.sizes[digit]
        if low < start:
            yield box.narrowed(digit, low, start)
        if start + size < high:
            yield box.narrowed(digit, start + size, high)
        box = box.narrowed(digit, start, start + size)
