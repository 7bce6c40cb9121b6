"""The sum by which a damaged bucket is told."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.engines.weight_sync.transports.bucket_header import checksum


def words(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))


def total(data: Tensor) -> int:
    return int(checksum(data.view(torch.uint8)))


def test_every_word_has_an_odd_weight_of_its_own() -> None:
    """Whole rows of 1024 words, and a last one that is shorter: one changed word, or two exchanged, are seen."""
    for count in (1, 1023, 1024, 2 * 1024 + 100):
        weights = []
        for place in range(count):
            data = torch.zeros(count, dtype=torch.int64)
            data[place] = 1
            weights.append(total(data))
        assert all(weight % 2 for weight in weights)
        assert len(set(weights)) == count


def test_exchanged_parts_are_seen() -> None:
    data = words(64 * 1024)
    before = total(data)
    grid = data.view(64, 1024)
    places = [((5, 100), (0, 122)), ((3, 0), (4, 0)), ((0, 0), (0, 512)), ((7, 30), (63, 900))]
    for (row, column), (other_row, other_column) in places:
        one, other = grid[row, column : column + 20], grid[other_row, other_column : other_column + 20]
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        assert total(data) != before
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    assert total(data) == before
