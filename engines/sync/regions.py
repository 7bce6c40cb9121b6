"""Strided copies between storages: composed, cut, subtracted and coalesced, exactly.

A region is an offset, and a size and a stride for each dimension, in elements. To compare two regions of one storage
its elements are numbered by digits: with the strides of both as 1 = s_0 | s_1 | s_2 ... (each divides the next),
element x has the digits (x mod s_1) / s_0, (x mod s_2) / s_1, ... A region is a few boxes, a range for each digit, and
boxes are intersected and subtracted digit by digit. Along a digit the other end of a copy moves by a fixed step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

_Tag = TypeVar("_Tag")


class NotNestedError(Exception):
    """Strides that do not divide each other, or a region that overlaps itself: it cannot be told what meets what."""


class Copy(NamedTuple):
    """Element i of ``shape`` goes from ``source_offset + i @ source_stride`` to ``offset + i @ stride``."""

    shape: tuple[int, ...]
    source_offset: int
    source_stride: tuple[int, ...]
    """0 where one element is spread over a dimension."""
    offset: int
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def span(offset: int, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """First element of a region that is not empty, and one past its last."""
    return offset, offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def canonical(copy: Copy) -> Copy:
    """The same copy in as few dimensions as possible, the widest stride of the destination first."""
    if 0 in copy.shape:
        return Copy((0,), copy.source_offset, (1,), copy.offset, (1,))
    merged: list[tuple[int, int, int]] = []
    for stride, source_stride, size in sorted(zip(copy.stride, copy.source_stride, copy.shape, strict=True))[::-1]:
        if size == 1:
            continue
        if merged and merged[-1][0] == stride * size and merged[-1][1] == source_stride * size:
            merged[-1] = (stride, source_stride, size * merged[-1][2])
        else:
            merged.append((stride, source_stride, size))
    shape = tuple(size for _, _, size in merged)
    return Copy(shape, copy.source_offset, tuple(s for _, s, _ in merged), copy.offset, tuple(d for d, _, _ in merged))


def compose(first: Copy, second: Copy) -> list[Copy]:
    """What ``second`` takes from where ``first`` puts it, as copies from first's source to second's destination.

    Raises:
        NotNestedError: the two cannot be compared.
    """
    ends = _End.of(first, "destination"), _End.of(second, "source")
    found = []
    for left, right in _pairs(*ends):
        if common := _common(left, right):
            free = tuple(size for size, _ in right.free)
            source_stride = left.step + (0,) * len(free)
            stride = right.step + tuple(step for _, step in right.free)
            found.append(
                Copy(common.sizes + free, left.at(common.start), source_stride, right.at(common.start), stride)
            )
    return [canonical(copy) for copy in found]


def cut(copy: Copy, first: int, end: int) -> list[Copy]:
    """The part of a canonical copy whose source elements are within [first, end).

    Raises:
        NotNestedError: the source region overlaps itself.
    """
    low, high = span(copy.source_offset, copy.shape, copy.source_stride)
    if first <= low and high <= end:
        return [copy]
    if high <= first or end <= low or 0 in copy.shape:
        return []
    interval = Copy((end - first,), first, (1,), first, (1,))
    return compose(interval, copy)


def subtract(copy: Copy, hole: Copy) -> list[Copy]:
    """The part of a copy that ``hole`` does not write over.

    Raises:
        NotNestedError: the two cannot be compared.
    """
    own, other = _End.of(copy, "destination"), _End.of(hole, "destination")
    radix = _radix(own, other)
    remaining = list(_boxes(own, radix))
    for box in _boxes(other, radix):
        remaining = [part for whole in remaining for part in _minus(whole, box)]
    strides = tuple(radix)
    return [
        canonical(Copy(box.sizes, box.at(box.start), box.step, _dot(box.start, strides), strides)) for box in remaining
    ]


def visible(writes: Iterable[tuple[Copy, _Tag]]) -> list[tuple[Copy, _Tag]]:
    """What is left of writes in their order, where later ones win: disjoint copies, by rising offset.

    Raises:
        NotNestedError: two that overlap cannot be compared.
    """
    spanned = [(*span(copy.offset, copy.shape, copy.stride), copy, tag) for copy, tag in writes if copy.numel]
    spanned.reverse()
    kept = sorted(spanned, key=lambda one: one[0])
    if any(one[1] > later[0] for one, later in itertools.pairwise(kept)):
        kept = sorted(_uncovered(spanned), key=lambda one: one[0])
    return [(copy, tag) for _, _, copy, tag in kept]


def _uncovered(latest_first: list[tuple[int, int, Copy, _Tag]]) -> Iterator[tuple[int, int, Copy, _Tag]]:
    above: list[tuple[int, int, Copy]] = []
    for low, high, copy, tag in latest_first:
        parts = [copy]
        for other_low, other_high, other in above:
            if other_low < high and low < other_high and parts:
                parts = [left for part in parts for left in subtract(part, other)]
        above.append((low, high, copy))
        yield from ((*span(part.offset, part.shape, part.stride), part, tag) for part in parts)


def coalesce(copies: Iterable[Copy]) -> list[Copy]:
    """The same disjoint copies between one pair of storages, in fewer: neighbours joined, rows of boxes made one."""
    found = [canonical(copy) for copy in copies]
    while True:
        before = len(found)
        found = _joined_ends(_joined_rows(found))
        if len(found) == before:
            return found


def _joined_rows(copies: list[Copy]) -> list[Copy]:
    """Copies of one shape whose ends both move by fixed steps get one more dimension."""
    alike: dict[tuple[tuple[int, ...], ...], list[Copy]] = {}
    for copy in copies:
        alike.setdefault((copy.shape, copy.source_stride, copy.stride), []).append(copy)
    found = []
    for (shape, source_stride, stride), group in alike.items():
        group.sort(key=lambda copy: copy.offset)
        first = 0
        while first < len(group):
            end, step, source_step = _progression(group, first)
            row = group[first]
            if end - first > 1:
                shape_, source, own = (end - first, *shape), (source_step, *source_stride), (step, *stride)
                row = canonical(Copy(shape_, row.source_offset, source, row.offset, own))
            found.append(row)
            first = end
    return found


def _progression(group: list[Copy], first: int) -> tuple[int, int, int]:
    """Where the steps that begin at ``first`` change, and the steps of both ends."""
    if first + 1 == len(group):
        return first + 1, 0, 0
    step = group[first + 1].offset - group[first].offset
    source_step = group[first + 1].source_offset - group[first].source_offset
    if source_step < 0:  # no tensor has negative strides
        return first + 1, 0, 0
    end = first + 2
    while (
        end < len(group)
        and group[end].offset - group[end - 1].offset == step
        and group[end].source_offset - group[end - 1].source_offset == source_step
    ):
        end += 1
    return end, step, source_step


def _joined_ends(copies: list[Copy]) -> list[Copy]:
    """Copies that continue each other along their outermost dimension, however long each is."""
    found: list[Copy] = []
    open_ends: dict[tuple[object, ...], int] = {}
    for copy in sorted(copies, key=lambda copy: copy.offset):
        if not copy.shape:
            found.append(copy)
            continue
        size, *inner = copy.shape
        kind = tuple(inner), copy.source_stride, copy.stride
        at = open_ends.pop((*kind, copy.source_offset, copy.offset), None)
        if at is None:
            at = len(found)
            found.append(copy)
        else:
            found[at] = found[at]._replace(shape=(found[at].shape[0] + size, *inner))
        ends = copy.source_offset + size * copy.source_stride[0], copy.offset + size * copy.stride[0]
        open_ends[(*kind, *ends)] = at
    return [canonical(copy) for copy in found]


# ---------------------------------------------------------------------------------------------------- digits


class _End(NamedTuple):
    """One end of a copy, and for each of its dimensions the step of the other end."""

    offset: int
    dims: tuple[tuple[int, int, int], ...]
    """(stride, size, step of the other end), narrow strides first."""
    free: tuple[tuple[int, int], ...]
    """(size, step of the other end) where this end stays."""
    other: int

    @classmethod
    def of(cls, copy: Copy, which: Literal["source", "destination"]) -> _End:
        own, other = (copy.source_offset, copy.source_stride), (copy.offset, copy.stride)
        if which == "destination":
            own, other = other, own
        dims = sorted(d for d in zip(own[1], copy.shape, other[1], strict=True) if d[1] > 1)
        free = tuple((size, step) for stride, size, step in dims if stride == 0)
        return cls(own[0], tuple(dims[len(free) :]), free, other[0])


class _Box(NamedTuple):
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

    def narrowed(self, digit: int, start: int, end: int) -> _Box:
        starts = (*self.start[:digit], start, *self.start[digit + 1 :])
        sizes = (*self.sizes[:digit], end - start, *self.sizes[digit + 1 :])
        return _Box(starts, sizes, self.step, self.at(starts), self.free)


class _Range(NamedTuple):
    start: tuple[int, ...]
    sizes: tuple[int, ...]


def _pairs(left: _End, right: _End) -> Iterator[tuple[_Box, _Box]]:
    """``left`` is where something is written, so that it cannot stay."""
    radix = _radix(left, right)
    rights = list(_boxes(right, radix))
    return ((box, other) for box in _boxes(left, radix) for other in rights)


def _radix(*ends: _End) -> list[int]:
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


def _boxes(end: _End, radix: list[int]) -> Iterator[_Box]:
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
        yield from _boxes(end._replace(dims=_sorted(*others, *first)), radix)
        if tail:
            moved = end._replace(offset=end.offset + head * stride, other=end.other + head * step)
            yield from _boxes(moved._replace(dims=_sorted(*others, *tail)), radix)
        return
    yield _box(end, radix)


def _sorted(*dims: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    return tuple(sorted(dim for dim in dims if dim[1] > 1))


def _box(end: _End, radix: list[int]) -> _Box:
    start, rest = [], end.offset
    for stride in reversed(radix):
        start.append(rest // stride)
        rest %= stride
    sizes, steps = [1] * len(radix), [0] * len(radix)
    for stride, size, step in end.dims:
        digit = radix.index(stride)
        sizes[digit], steps[digit] = size, step
    return _Box(tuple(start[::-1]), tuple(sizes), tuple(steps), end.other, end.free)


def _common(one: _Box, other: _Box) -> _Range | None:
    start = tuple(map(max, one.start, other.start))
    sizes = tuple(
        min(a + m, b + n) - begin
        for a, m, b, n, begin in zip(one.start, one.sizes, other.start, other.sizes, start, strict=True)
    )
    return _Range(start, sizes) if min(sizes) > 0 else None


def _minus(box: _Box, hole: _Box) -> Iterator[_Box]:
    common = _common(box, hole)
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


def _dot(numbers: Sequence[int], strides: Sequence[int]) -> int:
    return sum(number * stride for number, stride in zip(numbers, strides, strict=True))
