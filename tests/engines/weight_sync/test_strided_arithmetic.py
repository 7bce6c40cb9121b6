"""Copies between storages, against the same copies done element by element."""

from __future__ import annotations

import itertools
import random

import pytest

from rlcore.engines.weight_sync.planning.strided_copy import Copy, canonical, coalesce, compose, cut, subtract, visible
from rlcore.engines.weight_sync.planning.strided_layout import NotNestedError

Pairs = dict[int, int]
"""Destination element -> source element."""


def pairs(copy: Copy) -> Pairs:
    found = [(copy.source_offset, copy.offset)]
    for size, source_stride, stride in zip(copy.shape, copy.source_stride, copy.stride, strict=True):
        found = [(s + i * source_stride, d + i * stride) for s, d in found for i in range(size)]
    elements = {d: s for s, d in found}
    assert len(elements) == len(found), "a destination is written twice"
    return elements


def joined(copies: list[Copy]) -> Pairs:
    """Return the pairs of disjoint copies."""
    found: Pairs = {}
    for copy in copies:
        more = pairs(copy)
        assert not found.keys() & more.keys()
        found |= more
    return found


def random_view(rng: random.Random, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and stride of a slice of a row-major tensor, its dimensions shuffled."""
    strides = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, strides[0] * size)
    offset, dims = 0, []
    for size, stride in zip(sizes, strides, strict=True):
        first = rng.randrange(size)
        step = rng.choice([1, 1, 1, 2]) if size % 2 == 0 else 1
        if step == 2:
            first %= 2
            count = size // 2
        else:
            count = rng.randint(1, size - first)
        offset += first * stride
        dims.append((count, stride * step))
    rng.shuffle(dims)
    return offset, tuple(count for count, _ in dims), tuple(stride for _, stride in dims)


def random_write(rng: random.Random, sizes: tuple[int, ...]) -> Copy:
    """Into a slice of a tensor of ``sizes``, from a dense source somewhere."""
    offset, shape, stride = random_view(rng, sizes)
    order = list(range(len(shape)))
    rng.shuffle(order)
    source_stride, dense = [0] * len(shape), 1
    for dim in order:
        source_stride[dim] = dense
        dense *= shape[dim]
    return Copy(shape, rng.randrange(100), tuple(source_stride), offset, stride)


SIZES = [(12,), (4, 6), (2, 3, 4), (6, 4, 2), (2, 2, 6, 2)]


def test_a_copy_keeps_its_elements_in_fewer_dimensions() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        copy = random_write(rng, rng.choice(SIZES))
        found = canonical(copy)
        assert pairs(found) == pairs(copy), seed
        assert len(found.shape) <= len(copy.shape) and 1 not in found.shape, seed


def test_a_copy_out_of_a_copy() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        sizes = rng.choice(SIZES)
        first, read = random_write(rng, sizes), random_write(rng, sizes)
        second = Copy(read.shape, read.offset, read.stride, read.source_offset, read.source_stride)
        kept = pairs(first)
        want = {d: kept[s] for d, s in pairs(second).items() if s in kept}
        assert joined(compose(first, second)) == want, seed


def test_one_element_spread_over_a_dimension_stays_spread() -> None:
    first = Copy((4, 3), 7, (3, 1), 0, (3, 1))
    second = Copy((2, 5), 4, (3, 0), 100, (5, 1))  # rows 1 and 2 of column 1, five times each
    assert joined(compose(first, second)) == {100 + i: 11 if i < 5 else 14 for i in range(10)}


def test_a_cut_takes_exactly_the_elements_of_a_range() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        copy = canonical(random_write(rng, rng.choice(SIZES)))
        first = rng.randrange(160)
        end = first + rng.randrange(60)
        want = {d: s for d, s in pairs(copy).items() if first <= s < end}
        assert joined(cut(copy, first, end)) == want, seed


def test_what_is_left_beside_a_hole() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        sizes = rng.choice(SIZES)
        copy, hole = random_write(rng, sizes), random_write(rng, sizes)
        want = {d: s for d, s in pairs(copy).items() if d not in pairs(hole)}
        assert joined(subtract(copy, hole)) == want, seed


def test_later_writes_win() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        sizes = rng.choice(SIZES)
        writes = [(random_write(rng, sizes), tag) for tag in range(rng.randint(1, 6))]
        want: dict[int, tuple[int, int]] = {}
        for copy, tag in writes:
            want |= {d: (s, tag) for d, s in pairs(copy).items()}
        found: dict[int, tuple[int, int]] = {}
        for copy, tag in visible(writes):
            more = {d: (s, tag) for d, s in pairs(copy).items()}
            assert not found.keys() & more.keys()
            found |= more
        assert found == want, seed


def test_fewer_copies_do_the_same() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        sizes = rng.choice(SIZES)
        whole = canonical(random_write(rng, sizes))
        edges = sorted({whole.source_offset, whole.source_offset + 200, *(rng.randrange(200) for _ in range(6))})
        parts = [part for a, b in itertools.pairwise(edges) for part in cut(whole, a, b)]
        rng.shuffle(parts)
        found = coalesce(parts)
        assert joined(found) == joined(parts), seed
        assert len(found) <= len(parts), seed


def test_pieces_of_equal_experts_become_one_box() -> None:
    experts, rows, columns = 128, 6, 4
    gate = [
        Copy((rows, columns), e * rows * columns, (columns, 1), 2 * e * rows * columns, (columns, 1))
        for e in range(experts)
    ]
    assert coalesce(gate) == [Copy((experts, rows * columns), 0, (rows * columns, 1), 0, (2 * rows * columns, 1))]


def test_rows_in_reverse_stay_apart() -> None:
    rows = [Copy((4,), 4 * (5 - row), (1,), 10 * row, (1,)) for row in range(5)]
    found = coalesce(rows)
    assert sorted(found) == sorted(rows)  # no tensor has negative strides


def test_rows_cut_unevenly_become_one_again() -> None:
    whole = Copy((90,), 5, (1,), 40, (1,))
    parts = [part for a, b in [(0, 20), (20, 22), (22, 70), (70, 200)] for part in cut(whole, a, b)]
    assert len(parts) == 4
    assert coalesce(parts) == [whole]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Copy((4, 2), 0, (2, 1), 0, (6, 1)), Copy((3, 2), 0, (2, 1), 0, (4, 1))),  # 4 does not divide 6
        (Copy((4, 3), 0, (3, 1), 0, (2, 1)), Copy((2,), 0, (1,), 0, (1,))),  # rows of 3 every 2
    ],
)
def test_regions_that_cannot_be_compared_are_refused(one: Copy, other: Copy) -> None:
    with pytest.raises(NotNestedError, match=r"do not divide each other|overlaps itself"):
        subtract(one, other)
