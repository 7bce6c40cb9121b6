"""The pieces of a plan are cut into buckets that fit into a slot, and come out of it where they belong."""

from __future__ import annotations

import pytest
import torch

from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT, BucketPiece, buckets_of, packing, unpacking
from rlcore.engines.weight_sync.planning.execution import CopyExecution
from rlcore.engines.weight_sync.planning.strided_copy import Copy
from rlcore.engines.weight_sync.transports.staging_buffers import views

SOURCES = {0: torch.arange(1.0, 401), 1: torch.arange(1000.0, 1700).to(torch.bfloat16)}
NAMES = {0: "float32", 1: "bfloat16"}


def piece(source: int, shape: tuple[int, ...], start: int, stride: tuple[int, ...], at: int) -> BucketPiece:
    """A copy out of one of SOURCES into the dense places of "out" from ``at`` on."""
    return BucketPiece(source, "out", NAMES[source], Copy(shape, start, stride, at, torch.empty(shape).stride()))


PIECES = [
    piece(0, (20, 20), 0, (1, 20), 0),  # transposed; larger than a small slot, and none of its rows is
    piece(0, (0, 3), 0, (20, 1), 400),
    piece(1, (7,), 3, (2,), 400),
    piece(1, (650,), 50, (1,), 407),  # without rows, and larger than a small slot
    piece(1, (2, 300), 0, (400, 1), 1057),  # one row of it is larger than the smallest slot
    piece(0, (2, 3, 4), 5, (100, 20, 1), 1657),
    piece(0, (3,), 7, (0,), 1681),
]
NUM_VALUES = 1684


def expected() -> torch.Tensor:
    out = torch.full((NUM_VALUES,), -1.0)
    for one in PIECES:
        values = SOURCES[int(one.source)].as_strided(one.copy.shape, one.copy.source_stride, one.copy.source_offset)
        out[one.copy.offset :][: one.copy.numel] = values.float().flatten()
    return out


@pytest.mark.parametrize("num_alignments", [2, 3, 8, 64])
def test_every_value_goes_through_a_slot_to_its_place(num_alignments: int) -> None:
    slot_bytes = num_alignments * ALIGNMENT
    buckets = buckets_of(PIECES, slot_bytes)
    out = torch.full((NUM_VALUES,), -1.0)
    for bucket in buckets:
        slot = torch.full((slot_bytes,), 255, dtype=torch.uint8)
        CopyExecution(packing(bucket)).run(SOURCES, views(slot, bucket))
        assert slot[:ALIGNMENT].eq(255).all(), "the header's place is left alone"
        assert slot[bucket.nbytes :].eq(255).all(), "what follows the bucket is left alone"
        CopyExecution(unpacking(bucket)).run(views(slot, bucket), {"out": out})
    assert torch.equal(out, expected())
    assert sum(bucket.payload_bytes for bucket in buckets) == sum(one.nbytes for one in PIECES)


@pytest.mark.parametrize("num_alignments", [2, 3, 8, 64])
def test_a_bucket_fits_into_a_slot_and_the_next_piece_would_not(num_alignments: int) -> None:
    slot_bytes = num_alignments * ALIGNMENT
    buckets = buckets_of(PIECES, slot_bytes)
    for bucket, after in zip(buckets, [*buckets[1:], None], strict=True):
        ends = [at + one.nbytes for at, one in zip(bucket.offsets, bucket.pieces, strict=True)]
        assert bucket.offsets[0] == ALIGNMENT and not any(at % ALIGNMENT for at in bucket.offsets)
        assert all(end <= at for end, at in zip(ends[:-1], bucket.offsets[1:], strict=True))
        assert ends[-1] <= bucket.nbytes <= slot_bytes and bucket.nbytes % ALIGNMENT == 0
        assert after is None or bucket.nbytes + after.pieces[0].nbytes > slot_bytes
    assert (len(buckets) == 1) == (num_alignments == 64)


def test_pieces_without_values_make_no_bucket() -> None:
    assert buckets_of([PIECES[1]], 2 * ALIGNMENT) == []
