"""Sampling in SGLang's schedulers, without SGLang: seeds, and log-probs of the distribution that was sampled from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.engines.sampling.hf.sampler import Sampler
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.sglang.sampling import request_params, sample

ALL = 1 << 30
"""SGLang's top-k of all tokens."""
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=4, temperature=1.5),
    SamplingParams(top_k=1),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, top_k=5, top_p=0.1),
]


def info_of(params: list[SamplingParams], keys: list[int]) -> Any:
    """Return what a scheduler makes of requests, as ``SamplingParams.__init__`` and ``from_schedule_batch`` do."""
    rows = [request_params(one, [], key) for one, key in zip(params, keys, strict=True)]
    for row in rows:
        if row["temperature"] == 0:
            row["temperature"], row["top_k"] = 1.0, 1
        row["top_k"] = ALL if row["top_k"] == -1 else row["top_k"]
    return SimpleNamespace(
        temperatures=torch.tensor([[row["temperature"]] for row in rows], dtype=torch.float),
        top_ps=torch.tensor([row["top_p"] for row in rows], dtype=torch.float),
        top_ks=torch.tensor([row["top_k"] for row in rows], dtype=torch.int32),
        sampling_seed=torch.tensor([row["sampling_seed"] for row in rows], dtype=torch.int64),
        is_all_greedy=all(row["top_k"] <= 1 for row in rows),
        need_top_p_sampling=any(row["top_p"] != 1.0 for row in rows),
        need_top_k_sampling=any(row["top_k"] != ALL for row in rows),
    )


def logits(rows: int) -> Tensor:
    return torch.randn(rows, 50, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("params", [[one] for one in KINDS] + [KINDS])
def test_it_samples_as_rlcores_own_sampler_does(params: list[SamplingParams]) -> None:
    """Requests are alone, and in a batch of all kinds; that sampler is held against exact distributions elsewhere."""
    keys, at = [11 * (row + 1) - 2**62 for row in range(len(params))], 5
    given = logits(len(params))
    expected, logprob_B = Sampler(params, keys, given.device).sample(given, at)
    before = given.clone()
    token_B, logprob_BV = sample(given, info_of(params, keys), torch.full((len(params),), at))
    assert torch.equal(token_B, expected)
    assert torch.equal(given, before), "SGLang's own buffer"
    # Bit by bit, though top-k 1 has temperature 1 + 2**-23, so that it is not taken for greedy: one token is all there.
    assert torch.equal(logprob_BV.gather(1, token_B[:, None]).squeeze(1), logprob_B)


def test_a_row_does_not_depend_on_the_others() -> None:
    keys, given, at = [5, -9, 2**40], logits(3), torch.tensor([4, 9, 4])
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0)]
    together, _ = sample(given, info_of(params, keys), at)
    for row, one in enumerate(params):
        alone, _ = sample(given[row : row + 1], info_of([one], keys[row : row + 1]), at[row : row + 1])
        assert alone == together[row]


def test_each_position_draws_anew() -> None:
    given, keys = torch.zeros(64, 50), [7] * 64
    token_B, _ = sample(given, info_of([SamplingParams()] * 64, keys), torch.arange(64))
    assert len(set(token_B.tolist())) > 20


def test_nan_logits_give_nan_logprobs() -> None:
    """The replica refuses them; torch.multinomial would end the process on a GPU."""
    given = logits(1)
    given[0, 3] = torch.nan
    token_B, logprob_BV = sample(given, info_of([SamplingParams()], [1]), torch.tensor([0]))
    assert logprob_BV[0, token_B[0]].isnan()
