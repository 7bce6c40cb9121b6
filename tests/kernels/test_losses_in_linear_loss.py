from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.ops import (
    LossFn,
    cispo,
    combine,
    cpgd,
    decoupled_ppo,
    dppo,
    entropy_bonus,
    gmpo,
    gspo,
    icepop,
    kl,
    linear_loss,
    on_policy,
    opsm,
    ppo_clip,
    reinforce,
    sapo,
    sequence_level,
    sequence_mask,
    sequence_mean,
    tis,
    vespo,
)
from tests.accuracy import assert_same_bits
from tests.kernels.plain import assert_equal_in_float64

T, H, V = 61, 11, 131
CU_SEQLENS = torch.tensor([0, 0, 1, 5, 40, 52, 61])  # an empty one, one token, one longer than most chunks

TERMS: dict[str, Callable[[], LossFn]] = {
    "ppo_clip": lambda: ppo_clip(dual_clip=3.0),
    "cispo": cispo,
    "cpgd": lambda: cpgd(drift_coef=0.1),
    "sapo": sapo,
    "dppo": dppo,
    "reinforce": reinforce,
    "decoupled_ppo": decoupled_ppo,
    "tis": lambda: tis(ppo_clip()),
    "icepop": lambda: icepop(cispo()),
    "kl": lambda: combine(kl(kind="r*k3", coef=0.1), entropy_bonus(coef=0.01)),
    "gspo": lambda: gspo(clip_low=0.2, clip_high=0.2),
    "gspo token form": lambda: gspo(clip_low=0.2, clip_high=0.2, form="token"),
    "gmpo": gmpo,
    "sequence mask": lambda: combine(sequence_mask(tis(ppo_clip()), low=0.8, high=1.2), kl(coef=0.1)),
    "decoupled by sequence": lambda: decoupled_ppo(weight_low=0.8, weight_high=1.2, level="sequence"),
    "vespo": lambda: vespo(k_positive=0.5, lambda_positive=0.5, k_negative=0.5, lambda_negative=0.5),
    "opsm": lambda: opsm(ppo_clip(), max_kl=0.01),
    "on policy": lambda: on_policy(combine(ppo_clip(), kl(kind="r*k3", coef=0.1))),
    "tis of gspo": lambda: tis(gspo(), level="sequence"),
}


def random_inputs() -> tuple[tuple[Tensor, Tensor], Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(T, H), normal(V, H) * 0.4
    targets = torch.randint(0, V, (T,), generator=generator)
    logprob = (hidden @ weight.T).log_softmax(1)[range(T), targets]
    old = logprob + normal(T) * 0.3
    per_token = {
        "old_logprobs": old,
        "ref_logprobs": logprob + normal(T) * 0.3,
        "rollout_logprobs": old + normal(T) * 0.3,
        "advantages": normal(T),
    }
    weights = torch.rand(T, generator=generator, dtype=torch.float64) / T
    weights[[3, 20, 60]] = 0
    options = {"per_token": per_token, "token_weight": weights, "cu_seqlens": CU_SEQLENS}
    return (hidden.requires_grad_(), weight.requires_grad_()), targets, options


OF_EACH_KIND = ("ppo_clip", "kl", "gspo", "gspo token form", "sequence mask", "on policy", "tis of gspo")
"""Of tokens and of sequences, alone, combined and around another."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_EACH_KIND)) for name in TERMS]
)
def test_small_chunks_change_nothing(name: str) -> None:
    inputs, targets, options = random_inputs()
    runs = []
    for implementation, rows in (("reference", None), ("chunked", 5), ("chunked", 20)):
        budget = None if rows is None else 3 * rows * V * 8
        found = linear_loss(
            *inputs,
            targets,
            TERMS[name](),
            implementation=implementation,
            **({} if budget is None else {"memory_budget_bytes": budget}),
            **options,
        )
        runs.append((found, torch.autograd.grad(found.loss, inputs)))
    (want, want_gradients), *others = runs
    assert want.loss != 0 and all(gradient.abs().max() > 0 for gradient in want_gradients)
    for found, gradients in others:
        assert_equal_in_float64(found, want, terms=T + V)
        assert_equal_in_float64(gradients, want_gradients, terms=T + V)


@pytest.mark.parametrize(
    ("name", "garbage"), [*((name, math.nan) for name in OF_EACH_KIND), ("gspo", math.inf), ("gspo", -math.inf)]
)
def test_masked_tokens_contribute_nothing_whatever_they_hold(name: str, garbage: float) -> None:
    inputs, targets, options = random_inputs()
    want = linear_loss(*inputs, targets, TERMS[name](), **options)
    want_gradients = torch.autograd.grad(want.loss, inputs)
    is_masked = options["token_weight"] == 0
    for values in options["per_token"].values():
        values[is_masked] = garbage
    with torch.no_grad():
        inputs[0][is_masked] = garbage
    found = linear_loss(*inputs, targets, TERMS[name](), **options)
    gradients = torch.autograd.grad(found.loss, inputs)
    assert gradients[0][is_masked].count_nonzero() == 0
    assert found.stats.keys() == want.stats.keys()
    # The same operations: what is masked counts as rows of zeros whatever it holds.
    for one, other in zip(
        (found.loss, *found.stats.values(), *gradients), (want.loss, *want.stats.values(), *want_gradients), strict=True
    ):
        assert_same_bits(one, other)


@pytest.mark.slow
def test_terms_have_no_graph_break_under_compile() -> None:
    """All in one graph, which costs a fifth of one for each. The backend "eager" needs no compiler; a wait for the
    device or a Python branch on values would break it."""
    terms = {name: make() for name, make in TERMS.items()}
    functions = {name: term.function if isinstance(term, sequence_level) else term for name, term in terms.items()}
    (hidden, weight), targets, options = random_inputs()
    logprob = (hidden @ weight.T).log_softmax(1)[range(T), targets].detach()
    per_token = options["per_token"] | {"cu_seqlens": CU_SEQLENS, "token_mask": options["token_weight"] != 0}
    entropy = torch.ones(T, dtype=torch.float64)

    def evaluated(logprob: Tensor) -> dict[str, Any]:
        return {name: function(logprob, entropy, per_token) for name, function in functions.items()}

    found = torch.compile(evaluated, backend="eager", fullgraph=True)(logprob)
    for name, term in terms.items():
        (value, stats), (want, want_stats) = found[name], term(logprob, entropy, per_token)
        assert torch.equal(value, want) and stats.keys() == want_stats.keys(), name
        assert all(torch.equal(stats[key], want_stats[key]) for key in stats), "the backend runs the same operations"


def test_a_published_loss_is_a_few_lines_of_plain_torch() -> None:
    @sequence_level
    def luspo(logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]) -> Any:
        """LUSPO: GSPO times the length of the sequence, which the caller passes."""
        ratio = sequence_mean(logprob - per_token["old_logprobs"], per_token).exp()
        advantage = per_token["advantages"]
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -per_token["lengths"] * surrogate, {"ratio_mean": ratio}

    inputs, targets, options = random_inputs()
    options["token_weight"] = torch.ones(T, dtype=torch.float64)
    length = CU_SEQLENS.diff()
    options["per_token"]["lengths"] = length.repeat_interleave(length)
    runs = []
    for rows in (5, 61):
        found = linear_loss(*inputs, targets, luspo, memory_budget_bytes=3 * rows * V * 8, **options)
        runs.append((found.loss, torch.autograd.grad(found.loss, inputs)))
    assert_equal_in_float64(*runs, terms=T + V)

    logprob = (inputs[0] @ inputs[1].T).log_softmax(1)[range(T), targets]
    want = logprob.new_zeros(())
    for tokens in (slice(0, 1), slice(1, 5), slice(5, 40), slice(40, 52), slice(52, 61)):
        count = tokens.stop - tokens.start
        ratio = (logprob - options["per_token"]["old_logprobs"])[tokens].mean().exp()
        advantage = options["per_token"]["advantages"][tokens]
        want = want - count * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    assert_equal_in_float64(runs[0], (want, torch.autograd.grad(want, inputs)), terms=T + V)


def test_the_effective_sample_size_follows_from_the_statistics() -> None:
    inputs, targets, options = random_inputs()
    options["token_weight"] = (options["token_weight"] != 0).double()
    _, stats = linear_loss(*inputs, targets, tis(reinforce(), cap=1.3), **options)
    counted = options["token_weight"] != 0
    log_weight = options["per_token"]["old_logprobs"] - options["per_token"]["rollout_logprobs"]
    weight = log_weight[counted].exp().clamp(max=1.3)
    share = stats["tis_weight_mean"] ** 2 / stats["tis_weight_square_mean"]
    assert_equal_in_float64(share * counted.sum(), weight.sum() ** 2 / weight.square().sum(), terms=T)
