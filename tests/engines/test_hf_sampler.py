"""Randomness and choice, without a model. Legend: B = rows, V = vocabulary."""

from __future__ import annotations

import pytest
import torch

from rlcore.engines.sampling.draws import uniform
from rlcore.engines.sampling.hf.sampler import Sampler
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.seeds import sample_keys
from tests.accuracy import assert_within_rounding

from .plain_sampling import restricted

CPU = torch.device("cpu")


def splitmix64(key: int, position: int) -> int:
    """The published generator in unbounded integers."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_reference_generator_is_the_published_one() -> None:
    # First outputs for seed 1234567, as published with the algorithm's many implementations.
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("position", [0, 1, 31, 100_000])
def test_uniform_is_the_top_24_bits_of_splitmix64(position: int) -> None:
    keys = [0, 1, -1, 1234567, 2**63 - 1, -(2**63)]
    want = [(splitmix64(key % 2**64, position) >> 40) / 2**24 for key in keys]
    assert uniform(torch.tensor(keys), position).tolist() == want


def test_keys_depend_on_seed_prompt_and_sample() -> None:
    keys = {
        key
        for seed in (0, 1, -1)
        for prompt in ([1, 2], [2, 1], [1], [1, 2, 0])
        for key in sample_keys(prompt, seed=seed, n=3)
    }
    assert len(keys) == 3 * 4 * 3
    assert sample_keys([1, 2], seed=7, n=2) == sample_keys((1, 2), seed=7, n=5)[:2]


def draw(logits_V: list[float], count: int, **params: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs of ``count`` rows with the same logits and different keys."""
    rows = [SamplingParams(**params)] * count  # type: ignore[arg-type]
    sampler = Sampler(rows, sample_keys([1], seed=0, n=count), CPU)
    return sampler.sample(torch.tensor(logits_V).expand(count, -1), 0)


def assert_logprobs(logprob_B: torch.Tensor, token_B: torch.Tensor, logits_BV: torch.Tensor, **params: float) -> None:
    """Scaled and shifted logits, their exponentials, the sum and its logarithm: no more roundings than these."""
    exact_BV = restricted(logits_BV.double(), **params)  # type: ignore[arg-type]
    size = float((logits_BV / params.get("temperature", 1.0)).abs().max()) + 1
    exact_B = exact_BV.gather(1, token_B[:, None])[:, 0]
    assert_within_rounding(logprob_B, exact_B, terms=logits_BV.shape[1] + 12, magnitude=torch.full_like(exact_B, size))


@pytest.mark.parametrize(
    "params, probabilities",
    [
        ({}, [0.5, 0.2, 0.2, 0.06, 0.04]),
        ({"temperature": 2.0}, [0.5**0.5, 0.2**0.5, 0.2**0.5, 0.06**0.5, 0.04**0.5]),
        ({"top_k": 3}, [0.5, 0.2, 0.2, 0, 0]),
        ({"top_p": 0.85}, [0.5, 0.2, 0.2, 0, 0]),
        ({"top_k": 1}, [1.0, 0, 0, 0, 0]),
    ],
)
def test_frequencies_are_the_probabilities(params: dict[str, float], probabilities: list[float]) -> None:
    count = 20_000
    want_V = torch.tensor(probabilities)
    want_V = want_V / want_V.sum()
    logits_V = torch.tensor([0.5, 0.2, 0.2, 0.06, 0.04]).log()
    token_B, logprob_B = draw(logits_V.tolist(), count, **params)
    assert_logprobs(logprob_B, token_B, logits_V.expand(count, -1), **params)
    counted_V = token_B.bincount(minlength=5).double()
    assert counted_V[want_V == 0].sum() == 0
    possible = want_V > 0
    expected_V = want_V[possible] * count
    chi_square = ((counted_V[possible] - expected_V) ** 2 / expected_V).sum()
    # 4 degrees of freedom at most: a right sampler exceeds 18.5 once in a thousand seeds.
    assert chi_square < 18.5


def test_a_masked_token_is_never_drawn_over_a_large_vocabulary() -> None:
    logits_BV = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0))
    sampler = Sampler([SamplingParams(top_k=20)] * 16, sample_keys([1], seed=0, n=16), CPU)
    allowed_BK = logits_BV.topk(20).indices
    for position in range(2):
        token_B, logprob_B = sampler.sample(logits_BV, position)
        assert (token_B[:, None] == allowed_BK).any(1).all()
        assert logprob_B.isfinite().all()


def test_greedy_takes_the_likeliest_token_with_its_plain_logprob() -> None:
    token_B, logprob_B = draw([1.0, 3.0, 2.0], 1, temperature=0.0)
    assert token_B.tolist() == [1]
    assert_logprobs(logprob_B, token_B, torch.tensor([[1.0, 3.0, 2.0]]))


def test_each_row_keeps_its_own_parameters_in_a_mixed_batch() -> None:
    rows = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=3.0),
    ]
    logits_BV = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    keys = sample_keys([5], seed=3, n=4)
    mixed = Sampler(rows, keys, CPU).sample(logits_BV, 2)
    for b, row in enumerate(rows):
        alone = Sampler([row], keys[b : b + 1], CPU).sample(logits_BV[b : b + 1], 2)
        assert mixed[0][b] == alone[0][0]
        restriction = {"temperature": row.temperature or 1.0, "top_p": row.top_p, "top_k": row.top_k}
        for logprob_B in (mixed[1][b : b + 1], alone[1]):
            assert_logprobs(logprob_B, alone[0], logits_BV[b : b + 1], **restriction)


def test_selected_rows_go_on_as_if_alone() -> None:
    rows = [SamplingParams(temperature=t) for t in (0.0, 0.7, 1.0, 2.0)]
    keys = sample_keys([5], seed=3, n=4)
    logits_BV = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(rows, keys, CPU)
    whole_B, _ = sampler.sample(logits_BV, 9)
    index_B = torch.tensor([0, 3])
    sampler.select(index_B)
    assert torch.equal(sampler.sample(logits_BV[index_B], 9)[0], whole_B[index_B])
