"""Strided copies between storages: composed, cut, subtracted and coalesced, exactly.

Each end of a copy is a strided layout: an offset, and a size and a stride for each dimension, in elements.
``strided_layout`` compares two of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from rlcore.engines.weight_sync.planning.strided_layout import (
    End,
    boxes_of,
    common_range,
    pairs_of_boxes,
    remainder,
    strides_of,
)

_Tag = TypeVar("_Tag")


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
    """Return the first element of a layout that is not empty, and one past its last."""
    return offset, offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def canonical(copy: Copy) -> Copy:
    """Return the same copy in as few dimensions as possible, the widest stride of the destination first."""
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
    """Return what ``second`` takes of what ``first`` writes, as copies from first's source to second's destination.

    Raises:
        NotNestedError: the two cannot be compared.
    """
    ends = _end(first, "destination"), _end(second, "source")
    found = []
    for left, right in pairs_of_boxes(*ends):
        if common := common_range(left, right):
            free = tuple(size for size, _ in right.free)
            source_stride = left.step + (0,) * len(free)
            stride = right.step + tuple(step for _, step in right.free)
            found.append(
                Copy(common.sizes + free, left.at(common.start), source_stride, right.at(common.start), stride)
            )
    return [canonical(copy) for copy in found]


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def cut(copy: Copy, first: int, end: int) -> list[Copy]:
    """Return the part of a canonical copy whose source elements are within [first, end).

    Raises:
        NotNestedError: the source layout overlaps itself.
    """
    low, high = span(copy.source_offset, copy.shape, copy.source_stride)
    if first <= low and high <= end:
        return [copy]
    if high <= first or end <= low or 0 in copy.shape:
        return []
    interval = Copy((end - first,), first, (1,), first, (1,))
    return compose(interval, copy)


def taken_from(held: Copy, copy: Copy) -> list[Copy]:
    """Return the part of a canonical copy whose source elements somebody holds, from where they are held.

    Args:
        held: canonical; from the numbers of elements in the holder's memory to their numbers in the source of ``copy``.

    Raises:
        NotNestedError: the source layout overlaps itself, or the two cannot be compared.
    """
    if len(held.shape) <= 1 and held.stride in ((), (1,)):  # a run of elements, with which any strides can be compared
        first = held.offset
        parts = cut(copy, first, first + held.numel)
        return [part._replace(source_offset=part.source_offset - first) for part in parts]
    return [] if 0 in copy.shape else compose(held, copy)


def subtract(copy: Copy, hole: Copy) -> list[Copy]:
    """Return the part of a copy that ``hole`` does not write over.

    Raises:
        NotNestedError: the two cannot be compared.
    """
    own, other = _end(copy, "destination"), _end(hole, "destination")
    strides = tuple(strides_of(own, other))
    remaining = list(boxes_of(own, strides))
    for box in boxes_of(other, strides):
        remaining = [part for whole in remaining for part in remainder(whole, box)]
    return [
        canonical(Copy(box.sizes, box.at(box.start), box.step, _dot(box.start, strides), strides)) for box in remaining
    ]


def visible(writes: Iterable[tuple[Copy, _Tag]]) -> list[tuple[Copy, _Tag]]:
    """Return what is left of writes, in their order, where later ones win: disjoint copies, by rising offset.

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
    """Return the same disjoint copies between two storages, in fewer: neighbours and regular rows are joined."""
    found = [canonical(copy) for copy in copies]
    while True:
        before = len(found)
        found = _joined_ends(_joined_rows(found))
        if len(found) == before:
            return found


def _joined_rows(copies: list[Copy]) -> list[Copy]:
    """Join copies of one shape whose ends both move by fixed steps: they get one more dimension."""
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
    """Return where the steps that begin at ``first`` change, and the steps of both ends."""
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
    """Join copies that continue each other along their outermost dimension, however long each is."""
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


def _end(copy: Copy, which: Literal["source", "destination"]) -> End:
    own, other = (copy.source_offset, copy.source_stride), (copy.offset, copy.stride)
    if which == "destination":
        own, other = other, own
    dims = sorted(d for d in zip(own[1], copy.shape, other[1], strict=True) if d[1] > 1)
    free = tuple((size, step) for stride, size, step in dims if stride == 0)
    return End(own[0], tuple(dims[len(free) :]), free, other[0])


def _dot(numbers: Sequence[int], strides: Sequence[int]) -> int:
    return sum(number * stride for number, stride in zip(numbers, strides, strict=True))
