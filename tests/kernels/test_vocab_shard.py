"""A split vocabulary: what the ranks find of their parts makes the statistics of whole rows.

The ranks are simulated in one process; test_heads_on_ranks.py has them in processes of their own.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlcore.kernels import vocab_shard
from rlcore.kernels.softmax_rows import RowStatistics, ScaledRows, statistics_
from rlcore.kernels.vocab_shard import VocabularyShard, partial_statistics_
from tests.accuracy import assert_as_accurate, assert_same_bits

T, V = 64, 50
CUTS = [(0, 20, V), (0, 0, 20, 21, V), (0, V, V)]


class Group(NamedTuple):
    """Stands for a process group, of which the merging asks the rank only."""

    number: int

    def rank(self) -> int:
        return self.number


def logits_of_unlike_parts() -> Tensor:
    """[T, V]: of half of the rows each part has another peak; of some a part is -inf."""
    logits_TV = torch.randn(T, V, generator=torch.Generator().manual_seed(0))
    logits_TV[:16, :20] += 6
    logits_TV[16:32, 20:] += 3
    logits_TV[32:36, 20:] = -torch.inf
    return logits_TV


def on_ranks(
    logits_TV: Tensor, rows: ScaledRows, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[RowStatistics], Tensor]:
    """Return each rank's statistics of whole rows, and the probabilities [T, V] that all have for their columns."""
    shards, parts, exps = [], [], []
    for rank, (start, end) in enumerate(itertools.pairwise(cuts)):
        group: Any = Group(rank)
        shards.append(VocabularyShard(group, torch.tensor(start), torch.tensor(V)))
        exps.append(logits_TV[:, start:end].clone())
        parts.append(partial_statistics_(exps[-1], shards[-1].rows(rows, end - start), with_entropy=True))
    monkeypatch.setattr(vocab_shard, "gathered", lambda part, group: torch.stack(parts))
    merged = [shard.merged(part, rows) for shard, part in zip(shards, parts, strict=True)]
    return merged, torch.cat([exp / each.total[:, None] for exp, each in zip(exps, merged, strict=True)], 1)


@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2, T)], ids=["one", "each row its own"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_parts_with_peaks_of_their_own_make_the_statistics_of_whole_rows(
    cuts: tuple[int, ...], temperature: float | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_TV, target_T = logits_of_unlike_parts(), torch.arange(T) % 20
    rows = ScaledRows(target_T, -100, 1 / temperature)
    found, probability_TV = on_ranks(logits_TV, rows, cuts, monkeypatch)
    wide = ScaledRows(
        target_T,
        -100,
        rows.inverse_temperature.double() if isinstance(rows.inverse_temperature, Tensor) else rows.inverse_temperature,
    )
    exps = logits_TV.clone(), logits_TV.double()
    plain, exact = (statistics_(exp, each, with_entropy=True) for exp, each in zip(exps, (rows, wide), strict=True))
    for name in ("logprob", "entropy"):
        assert_as_accurate(getattr(found[0], name), getattr(plain, name), getattr(exact, name), what=name)
        for other in found[1:]:  # they merge the same numbers in the same order
            assert_same_bits(getattr(other, name), getattr(found[0], name), name)
    probabilities = [exp / each.total[:, None] for exp, each in zip(exps, (plain, exact), strict=True)]
    assert_as_accurate(probability_TV, *probabilities, what="probability")
