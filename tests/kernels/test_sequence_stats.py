"""``sequence_stats=`` of linear_loss and token_loss: statistics of sequences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import combine, gspo, kl, linear_loss, ppo_clip, token_loss
from tests.accuracy import assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64

T, H, V = 61, 5, 37
EDGES = [0, 5, 5, 40, 52, 61]  # one empty, one longer than a chunk of 16 rows; the fourth has no token that counts
STATS = ("clip_low_mean", "clip_high_mean", "ratio_mean")


def random_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    old, advantages = -3.6 + torch.randn(T, **options), torch.randn(T, **options)
    weight = torch.rand(T, **options) + 0.1
    weight[40:52] = weight[2] = 0.0
    old[2] = math.nan
    return {"per_token": {"old_logprobs": old, "advantages": advantages}, "token_weight": weight}


def expected(logprob: Tensor, batch: dict[str, Any]) -> dict[str, Tensor]:
    """TRL's definitions, in a loop over sequences."""
    ratio = (logprob.detach() - batch["per_token"]["old_logprobs"]).exp()
    advantages, is_counted = batch["per_token"]["advantages"], batch["token_weight"] != 0
    vectors = {
        "clip_low": ((ratio < 0.8) & (advantages < 0)).double(),
        "clip_high": ((ratio > 1.28) & (advantages > 0)).double(),
        "ratio": ratio,
    }
    found = {}
    for name, values in vectors.items():
        sequences = [values[start:end][is_counted[start:end]] for start, end in itertools.pairwise(EDGES)]
        means = torch.stack([part.mean() for part in sequences if len(part)])
        assert len(means) == 3 and means.unique().numel() > 1
        found |= {
            f"{name}_sequence_mean": means.mean(),
            f"{name}_sequence_min": means.min(),
            f"{name}_sequence_max": means.max(),
        }
    return found


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_linear_loss_reports_means_of_sequences_that_its_chunks_cut(implementation: str) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, H, generator=generator, dtype=torch.float64) for n in (T, V))
    hidden.requires_grad_()
    batch, targets = random_batch(), torch.arange(T) % V
    options = {**batch, "implementation": implementation}
    plain = linear_loss(hidden, weight, targets, ppo_clip(), **options)
    found = linear_loss(
        hidden, weight, targets, ppo_clip(), sequence_stats=STATS, cu_seqlens=torch.tensor(EDGES), **options
    )
    assert torch.equal(plain.loss, found.loss)
    want = expected((hidden @ weight.T).log_softmax(1).gather(1, targets[:, None]).squeeze(1), batch)
    assert found.stats.keys() == plain.stats.keys() | want.keys()
    assert_equal_in_float64({name: found.stats[name] for name in want}, want, terms=T + V)
    assert all(found.stats[name] == plain.stats[name] for name in plain.stats)


@pytest.mark.parametrize(
    "term",
    [ppo_clip(), pytest.param(combine(ppo_clip(), kl(kind="r*k3", coef=0.1)), marks=pytest.mark.slow)],
    ids=["one", "combined"],
)
def test_token_loss_reports_them_also_in_one_graph(term: Any) -> None:
    torch.compiler.reset()
    logprob = torch.linspace(-6, -1, T, dtype=torch.float64, requires_grad=True)
    batch, edges = random_batch(), torch.tensor(EDGES, dtype=torch.int32)
    batch["per_token"]["ref_logprobs"] = batch["per_token"]["old_logprobs"]

    def evaluated() -> Any:
        return token_loss(logprob, term, sequence_stats=[*STATS], cu_seqlens=edges, **batch).stats

    want = expected(logprob, batch)
    for run in (evaluated, torch.compile(evaluated, fullgraph=True, backend="aot_eager")):
        stats = run()
        assert_equal_in_float64({name: stats[name] for name in want}, want, terms=T)
    torch.compiler.reset()


def test_a_loss_of_sequences_has_them_too() -> None:
    """Each of three sequences is stopped as a whole, or not at all."""
    log_ratio = torch.where(torch.arange(T) < 5, -1.0, 1.0)
    entries = {"old_logprobs": torch.zeros(T), "advantages": torch.full((T,), -1.0)}
    batch = {"per_token": entries, "token_weight": random_batch()["token_weight"].float()}
    stats = token_loss(
        log_ratio, gspo(), sequence_stats=["clip_low_mean"], cu_seqlens=torch.tensor(EDGES), **batch
    ).stats
    assert (stats["clip_low_sequence_min"], stats["clip_low_sequence_max"]) == (0, 1)
    assert_within_rounding(stats["clip_low_sequence_mean"], torch.tensor(1 / 3, dtype=torch.float64), terms=3 * T)


def test_without_a_token_that_counts_they_are_those_of_nothing() -> None:
    logprob = torch.zeros(3)
    entries = {"old_logprobs": torch.zeros(3), "advantages": torch.zeros(3)}
    found = token_loss(
        logprob,
        ppo_clip(),
        per_token=entries,
        token_weight=torch.zeros(3),
        sequence_stats=["clip_low_mean"],
        cu_seqlens=torch.tensor([0, 3]),
    ).stats
    assert found["clip_low_sequence_mean"].isnan()
    assert (found["clip_low_sequence_min"], found["clip_low_sequence_max"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sequence_stats": ["clip_low"]},
            "sequence_stats must be names .* that end in _mean; got 'clip_low'",
        ),
        ({"cu_seqlens": None}, "sequence_stats needs cu_seqlens, the boundaries of the sequences in "),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens must rise from 0 to the 3 tokens; got \[0, 4\]"),
        (
            {"sequence_stats": ["x_mean"]},
            "sequence_stats names 'x_mean', and the means of this loss are .*ratio_mean, approx",
        ),
        ({"sequence_stats": "clip_low_mean"}, "_loss takes a list or tuple as sequence_stats, got 'clip_low_mean'"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    entries = {"old_logprobs": torch.zeros(3), "advantages": torch.zeros(3)}
    given: dict[str, Any] = {"per_token": entries, "token_weight": torch.ones(3), "cu_seqlens": torch.tensor([0, 3])}
    given |= {"sequence_stats": ["clip_low_mean"]} | options
    with pytest.raises(InvalidInputError, match=message):
        token_loss(torch.zeros(3), ppo_clip(), **given)
    with pytest.raises(InvalidInputError, match=message):
        linear_loss(torch.zeros(3, 2), torch.zeros(4, 2), torch.arange(3), ppo_clip(), **given)
