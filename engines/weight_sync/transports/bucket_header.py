"""The header of a packed slot, by which a receiver knows what it reads.

A bucket that is stale, or that is told against another base than the receiver has, is refused; with a sum also one that
is incomplete or damaged. All that is told with a sum, or lies in a staging buffer, is refused before it is copied; the
rest before it counts as come.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT
from rlcore.errors import SyncError

_COLUMNS = 1024
_COLUMN_FACTOR = 5
_ROW_FACTOR = 2 * _COLUMN_FACTOR * _COLUMNS + 2  # above what the weights of two columns differ by; even


class BucketHeader(NamedTuple):
    """The first words of a slot, int64 each."""

    round_id: int
    bucket: int
    nbytes: int
    """The size of the whole bucket, with header and gaps (``Bucket.nbytes``)."""
    base: int
    """The round whose bucket this one is told against; 0: it is told whole."""
    message_bytes: int
    """The bytes of the slot in use, with the header: fewer than ``nbytes`` where only changes are told."""
    encoding: int = 0
    """An ``Encoding``."""
    num_changed: int = 0
    checksum: int = 0
    """The sum of the whole bucket, header left out; 0 where nothing compares it."""

    def write(self, slot: Tensor, total: Tensor | None = None) -> None:
        """Write it to the beginning of a slot, [n] uint8.

        Args:
            total: its ``checksum``, int64 scalar on the slot's device, for which the host does not wait.
        """
        words = torch.tensor(self, dtype=torch.int64).to(slot.device)
        if total is not None:
            words[-1] = total
        slot.view(torch.int64)[: len(self)] = words


def header_of(slot: Tensor) -> BucketHeader:
    """Return the header of a slot, [n] uint8, unchecked."""
    return BucketHeader(*slot[:ALIGNMENT].view(torch.int64)[: len(BucketHeader._fields)].tolist())


def checked_header(slot: Tensor, *, round_id: int, bucket: int, nbytes: int, base: int) -> BucketHeader:
    """Return the header of a slot; raises SyncError unless it is that of this bucket."""
    found = header_of(slot)
    if (found.round_id, found.bucket, found.nbytes) != (round_id, bucket, nbytes):
        raise SyncError(
            f"bucket {bucket} of round {round_id} was expected in a staging buffer, with {nbytes} bytes, and it "
            f"holds bucket {found.bucket} of round {found.round_id}, with {found.nbytes}"
        )
    if found.base != base:
        raise SyncError(
            f"bucket {bucket} of round {round_id} was expected {_told(base)}, and it came {_told(found.base)}"
        )
    check_message_bytes(found, nbytes)
    return found


def check_message_bytes(header: BucketHeader, most: int) -> None:
    """Raise SyncError unless a message of so many bytes may follow its header."""
    if not ALIGNMENT <= header.message_bytes <= most or header.message_bytes % 8:
        raise SyncError(f"a bucket came with {header.message_bytes} bytes, of which {ALIGNMENT} to {most} can be")


def _told(base: int) -> str:
    return f"as changes since round {base}" if base else "whole"


def check_sum(whole: Tensor, header: BucketHeader) -> None:
    """Raise SyncError unless ``whole``, [n] uint8, with place for a header, has the sum that the header gives."""
    if int(checksum(whole[ALIGNMENT : header.nbytes])) == header.checksum:
        return
    why = f"its {header.nbytes} bytes have another sum"
    if header.base:
        why = f"with what changed since round {header.base}, {why}: it is damaged, or the weights here are others"
    raise SyncError(f"bucket {header.bucket} of round {header.round_id} is damaged: {why}")


def checksum(data: Tensor) -> Tensor:
    """Return a number that changes with every single change.

    Exchanged parts change it too, unless the sums of their words are equal or differ in high bits alone.

    Args:
        data: [n] uint8, n a multiple of 8, aligned to 8 bytes.

    Returns:
        int64 scalar on the device of ``data``.
    """
    words = data.view(torch.int64)
    # Each word is multiplied by an odd number of its own: the difference of one cannot vanish modulo 2^64.
    rows = words.numel() // _COLUMNS
    grid, last = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    by_column, by_row = grid.sum(0), torch.cat([grid.sum(1), last.sum(0, keepdim=True)])
    by_column[: last.numel()] += last
    return _weighted(by_column) * _COLUMN_FACTOR + _weighted(by_row) * _ROW_FACTOR


def _weighted(values: Tensor) -> Tensor:
    weights = torch.arange(values.numel(), device=values.device) * 2 + 1
    return (values * weights).sum()
