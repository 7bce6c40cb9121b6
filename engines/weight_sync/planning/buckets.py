"""Buckets: the pieces of a plan, cut and laid out so that each list fits into a slot of a staging buffer.

A trainer's rank (``Sender.take_plan``) and a receiver (``PlanExecution.buckets``) each cut by themselves, from the
same pieces and slot size. What goes between them is the number of a bucket, and a header with its round, number, bytes
and checksum, never which pieces lie in it: a cut must depend on nothing else. Both ends have the same
version of rlcore (``endpoint.check_versions``), so that a cut may change from one version to the next.

Offsets, and the bytes of a bucket, are multiples of ``ALIGNMENT``: copies count on it. That buckets are as few as can
be only saves time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rlcore.engines.weight_sync.planning.manifest import dtype_of
from rlcore.engines.weight_sync.planning.strided_copy import Copy, dense

ALIGNMENT = 512
"""Bytes to which each piece in a slot is aligned; the header takes so much too."""


class BucketPiece(NamedTuple):
    """A copy between two tensors that are known by numbers or names. Receivers send these to senders as msgpack."""

    source: int | str
    """The sender's number of the parameter; computed weights are counted after all parameters."""
    destination: str
    dtype: str
    """The dtype in which the values travel, such as "bfloat16"."""
    copy: Copy

    @property
    def nbytes(self) -> int:
        return self.copy.numel * dtype_of(self.dtype).itemsize


class Bucket(NamedTuple):
    """The content of a slot."""

    pieces: list[BucketPiece]
    offsets: list[int]
    """Bytes from the slot's begin to each piece, multiples of ``ALIGNMENT``."""
    nbytes: int
    """Bytes of the slot in use, with header and gaps."""
    payload_bytes: int
    dtypes: frozenset[str]
    """The dtypes in which its pieces travel."""


def _bucket(pieces: list[BucketPiece], offsets: list[int], nbytes: int, payload_bytes: int) -> Bucket:
    return Bucket(pieces, offsets, nbytes, payload_bytes, frozenset(piece.dtype for piece in pieces))


def buckets_of(pieces: Iterable[BucketPiece], slot_bytes: int) -> list[Bucket]:
    """Put all pieces, in order, into as few buckets as possible; one that is larger than a slot is cut.

    Args:
        slot_bytes: size of a slot, header included; see ``check_slot_bytes`` of the staging buffers.
    """
    most_bytes = slot_bytes - ALIGNMENT
    buckets: list[Bucket] = []
    current: list[BucketPiece] = []
    offsets: list[int] = []
    used, payload = ALIGNMENT, 0
    for piece in _cut_to(pieces, most_bytes):
        nbytes = piece.nbytes
        if used + nbytes > slot_bytes:
            buckets.append(_bucket(current, offsets, used, payload))
            current, offsets, used, payload = [], [], ALIGNMENT, 0
        current.append(piece)
        offsets.append(used)
        payload += nbytes
        used += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if current:
        buckets.append(_bucket(current, offsets, used, payload))
    return buckets


def _cut_to(pieces: Iterable[BucketPiece], most_bytes: int) -> Iterator[BucketPiece]:
    for piece in pieces:
        if piece.copy.numel:
            for part in _parts(piece.copy, most_bytes // dtype_of(piece.dtype).itemsize):
                yield piece._replace(copy=part)


def _parts(copy: Copy, most: int) -> Iterator[Copy]:
    """Yield the same copy in parts of at most so many elements."""
    if copy.numel <= most:
        yield copy
        return
    inner = math.prod(copy.shape[1:])
    rows = max(1, most // inner)
    for first in range(0, copy.shape[0], rows):
        part = copy._replace(
            shape=(min(rows, copy.shape[0] - first), *copy.shape[1:]),
            source_offset=copy.source_offset + first * copy.source_stride[0],
            offset=copy.offset + first * copy.stride[0],
        )
        if inner > most:  # one row alone is too large
            part = part._replace(shape=part.shape[1:], source_stride=part.source_stride[1:], stride=part.stride[1:])
        yield from _parts(part, most)


def packing(bucket: Bucket) -> list[BucketPiece]:
    """Return the copies from a sender's tensors into the slot; the destination is the slot in the piece's dtype."""
    return [
        piece._replace(destination=piece.dtype, copy=copy._replace(offset=at, stride=dense(copy.shape)))
        for piece, copy, at in _placed(bucket)
    ]


def unpacking(bucket: Bucket) -> list[BucketPiece]:
    """Return the copies out of the slot; the source is the slot in the piece's dtype."""
    return [
        piece._replace(source=piece.dtype, copy=copy._replace(source_offset=at, source_stride=dense(copy.shape)))
        for piece, copy, at in _placed(bucket)
    ]


def repacking(bucket: Bucket) -> list[BucketPiece]:
    """Return the copies from what was unpacked back into a slot; the source is the tensor that was written."""
    return [
        BucketPiece(
            piece.destination,
            piece.dtype,
            piece.dtype,
            Copy(copy.shape, copy.offset, copy.stride, at, dense(copy.shape)),
        )
        for piece, copy, at in _placed(bucket)
    ]


def _placed(bucket: Bucket) -> Iterator[tuple[BucketPiece, Copy, int]]:
    for piece, offset in zip(bucket.pieces, bucket.offsets, strict=True):
        yield piece, piece.copy, offset // dtype_of(piece.dtype).itemsize
