from __future__ import annotations

import itertools

import pytest

from rlcore.kernels.chunks import DEFAULT_BUDGET_BYTES, batched_row_chunks, row_chunks, rows_per_chunk, sequence_chunks


def test_a_chunk_fits_its_budget_and_is_at_most_a_quarter_of_the_rows() -> None:
    assert rows_per_chunk(8192, 151936, 4, None) * 3 * 151936 * 4 <= DEFAULT_BUDGET_BYTES
    assert rows_per_chunk(8192, 100, 4, None) == 2048
    assert rows_per_chunk(40, 100, 4, None) == 14  # three chunks of at most 16
    assert rows_per_chunk(0, 100, 4, None) == 1


@pytest.mark.parametrize("num_rows, rows", [(1, 1), (7, 3), (6, 3), (5, 100)])
def test_row_chunks_cover_every_row_once(num_rows: int, rows: int) -> None:
    covered = [row for chunk in row_chunks(num_rows, rows) for row in range(num_rows)[chunk]]
    assert covered == list(range(num_rows))


def test_no_rows_are_one_empty_chunk() -> None:
    assert list(row_chunks(0, 4)) == [slice(0, 0)]
    assert list(sequence_chunks([0], 4)) == [(slice(0, 0), [0])]


def test_batched_row_chunks_walk_the_leading_dimensions() -> None:
    assert list(batched_row_chunks((2, 3), 2)) == [
        (0, slice(0, 2)),
        (0, slice(2, 3)),
        (1, slice(0, 2)),
        (1, slice(2, 3)),
    ]


def test_sequence_chunks_hold_as_many_whole_sequences_as_fit_with_edges_of_their_own() -> None:
    assert list(sequence_chunks([0, 5, 5, 40, 52, 61], 25)) == [
        (slice(0, 5), [0, 5, 5]),
        (slice(5, 40), [0, 35]),  # longer than a chunk, so alone
        (slice(40, 61), [0, 12, 21]),
    ]


@pytest.mark.parametrize("rows", [1, 7, 30, 1000])
def test_sequence_chunks_cover_every_sequence_once(rows: int) -> None:
    edges = list(itertools.accumulate([3, 0, 9, 30, 1, 1, 14], initial=0))
    found = [0]
    for chunk, own in sequence_chunks(edges, rows):
        assert own[0] == 0 and own[-1] == chunk.stop - chunk.start
        assert own[-1] <= rows or len(own) == 2
        found += [chunk.start + edge for edge in own[1:]]
    assert found == edges
