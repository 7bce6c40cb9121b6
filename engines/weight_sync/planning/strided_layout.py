"""Coordinates for the elements of a storage, so that strided layouts in it can be compared.

Let the strides of two layouts be 1 = s_0 | s_1 | s_2 ... (each divides the next). Then element x has the coordinates
(x mod s_1) / s_0, (x mod s_2) / s_1, ... A layout is a few boxes of them, with a range along each axis, and boxes are
intersected and subtracted axis by axis. A layout is an end of a copy: along an axis the other end has a fixed step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class NotNestedError(Exception):
    """Strides do not divide each other, or a layout overlaps itself, so that common elements cannot be found."""


class End(NamedTuple):
    """One end of a copy, and for each of its dimensions the step of the other end."""

    offset: int
    dims: tuple[tuple[int, int, int], ...]
    """(stride, size, step of the other end), narrow strides first."""
    free: tuple[tuple[int, int], ...]
    """(size, step of the other end) for dimensions of stride 0."""
    other: int
    """Offset of the other end."""


class CoordinateBox(NamedTuple):
    """The elements of an end that lie in a range along each axis."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    step: tuple[int, ...]
    """Step of the other end along each axis."""
    other: int
    """The other end's element for the one at ``start``."""
    free: tuple[tuple[int, int], ...]

    def at(self, start: Sequence[int]) -> int:
        """Return the other end's element for the one at these coordinates."""
        return self.other + sum((a - b) * step for a, b, step in zip(start, self.start, self.step, strict=True))

    def narrowed(self, axis: int, start: int, end: int) -> CoordinateBox:
        starts = (*self.start[:axis], start, *self.start[axis + 1 :])
        sizes = (*self.sizes[:axis], end - start, *self.sizes[axis + 1 :])
        return CoordinateBox(starts, sizes, self.step, self.at(starts), self.free)


class CoordinateRange(NamedTuple):
    """A range along each axis."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]


def pairs_of_boxes(left: End, right: End) -> Iterator[tuple[CoordinateBox, CoordinateBox]]:
    """Yield each box of ``left`` with each of ``right``. ``left`` is written, so that it has no stride of 0."""
    strides = strides_of(left, right)
    rights = list(boxes_of(right, strides))
    return ((box, other) for box in boxes_of(left, strides) for other in rights)


def strides_of(*ends: End) -> list[int]:
    """Return the strides of the axes on which all ends can be described; raises NotNestedError."""
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


def boxes_of(end: End, strides: Sequence[int]) -> Iterator[CoordinateBox]:
    """Yield an end as disjoint boxes: it is split where a dimension carries from one axis to the next."""
    for dim, (stride, size, step) in enumerate(end.dims):
        axis = strides.index(stride)
        if axis + 1 == len(strides):
            continue
        limit = strides[axis + 1] // stride
        begin = end.offset // stride % limit
        if begin + size <= limit:
            continue
        others = end.dims[:dim] + end.dims[dim + 1 :]
        whole = 0 if begin else size // limit
        head = whole * limit or limit - begin
        first = ((stride, limit, step), (stride * limit, whole, step * limit)) if whole else ((stride, head, step),)
        tail = ((stride, size - head, step),) if size > head else None
        yield from boxes_of(end._replace(dims=_sorted(*others, *first)), strides)
        if tail:
            moved = end._replace(offset=end.offset + head * stride, other=end.other + head * step)
            yield from boxes_of(moved._replace(dims=_sorted(*others, *tail)), strides)
        return
    yield _box(end, strides)


def _sorted(*dims: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    return tuple(sorted(dim for dim in dims if dim[1] > 1))


def _box(end: End, strides: Sequence[int]) -> CoordinateBox:
    start, rest = [], end.offset
    for stride in reversed(strides):
        start.append(rest // stride)
        rest %= stride
    sizes, steps = [1] * len(strides), [0] * len(strides)
    for stride, size, step in end.dims:
        axis = strides.index(stride)
        sizes[axis], steps[axis] = size, step
    return CoordinateBox(tuple(start[::-1]), tuple(sizes), tuple(steps), end.other, end.free)


def common_range(one: CoordinateBox, other: CoordinateBox) -> CoordinateRange | None:
    """Return the range that two boxes have in common; None if there is none."""
    start = tuple(map(max, one.start, other.start))
    sizes = tuple(
        min(a + m, b + n) - begin
        for a, m, b, n, begin in zip(one.start, one.sizes, other.start, other.sizes, start, strict=True)
    )
    return CoordinateRange(start, sizes) if min(sizes) > 0 else None


def remainder(box: CoordinateBox, hole: CoordinateBox) -> Iterator[CoordinateBox]:
    """Yield a box without another one, as disjoint boxes."""
    common = common_range(box, hole)
    if common is None:
        yield box
        return
    for axis, (start, size) in enumerate(zip(common.start, common.sizes, strict=True)):
        low, high = box.start[axis], box.start[axis] + box.sizes[axis]
        if low < start:
            yield box.narrowed(axis, low, start)
        if start + size < high:
            yield box.narrowed(axis, start + size, high)
        box = box.narrowed(axis, start, start + size)
