from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import combine, cpgd, entropy_bonus, kl, ppo_clip, token_loss


def random_tokens(count: int = 4000) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def normal(scale: float) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    logprob = normal(0.5) - 2
    per_token = {
        "old_logprobs": logprob + normal(0.5),
        "ref_logprobs": logprob + normal(0.5),
        "advantages": normal(1.0),
    }
    return logprob, per_token


def value_and_gradient(loss_fn: Any, logprob: Tensor, per_token: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    x = logprob.clone().requires_grad_()
    value, _ = loss_fn(x, None, per_token)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def finite_difference(loss_fn: Any, logprob: Tensor, per_token: dict[str, Tensor]) -> Tensor:
    step = 1e-6
    up, _ = loss_fn(logprob + step, None, per_token)
    down, _ = loss_fn(logprob - step, None, per_token)
    return (up - down) / (2 * step)


TERMS: dict[str, Callable[[], Any]] = {
    "ppo_clip": ppo_clip,
    "dual clip": lambda: ppo_clip(clip_low=0.1, clip_high=0.4, dual_clip=1.5),
    "k1": lambda: kl(kind="k1", coef=0.3),
    "k2": lambda: kl(kind="k2", coef=0.3),
    "k3": lambda: kl(kind="k3", coef=0.3),
    "abs": lambda: kl(kind="abs", coef=0.3),
    "sum": lambda: combine(ppo_clip(dual_clip=3.0), kl(coef=0.1)),
}


@pytest.mark.parametrize("name", TERMS)
def test_gradients_match_finite_differences(name: str) -> None:
    logprob, per_token = random_tokens()
    ratio = (logprob - per_token["old_logprobs"]).exp()
    kinks = torch.tensor([0.8, 0.9, 1.28, 1.4, 1.5, 3.0], dtype=torch.float64)
    is_smooth = (ratio[:, None] - kinks).abs().amin(1) > 1e-4
    is_smooth &= (logprob - per_token["ref_logprobs"]).abs() > 1e-4
    _, gradient = value_and_gradient(TERMS[name](), logprob, per_token)
    want = finite_difference(TERMS[name](), logprob, per_token)
    torch.testing.assert_close(gradient[is_smooth], want[is_smooth], rtol=1e-6, atol=1e-8)


def test_ppo_clip_is_the_formula_of_the_paper() -> None:
    logprob, per_token = random_tokens()
    value, gradient = value_and_gradient(ppo_clip(clip_low=0.2, clip_high=0.28), logprob, per_token)
    advantage, ratio = per_token["advantages"], (logprob - per_token["old_logprobs"]).exp()
    torch.testing.assert_close(value, -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    passes = torch.where(advantage > 0, ratio <= 1.28, ratio >= 0.8)
    torch.testing.assert_close(gradient, -advantage * ratio * passes)
    assert passes.any() and not passes.all()


def test_dual_clip_bounds_only_negative_advantages() -> None:
    logprob, per_token = random_tokens()
    plain, _ = value_and_gradient(ppo_clip(), logprob, per_token)
    dual, gradient = value_and_gradient(ppo_clip(dual_clip=1.5), logprob, per_token)
    advantage, ratio = per_token["advantages"], (logprob - per_token["old_logprobs"]).exp()
    is_bounded = (advantage < 0) & (ratio > 1.5)
    torch.testing.assert_close(dual, torch.where(is_bounded, -1.5 * advantage, plain))
    assert gradient[is_bounded].count_nonzero() == 0 and is_bounded.any()


def test_at_ratio_one_the_loss_is_minus_the_advantage_and_so_is_its_gradient() -> None:
    logprob, per_token = random_tokens()
    value, gradient = value_and_gradient(ppo_clip(), logprob, per_token | {"old_logprobs": logprob})
    assert torch.equal(value, -per_token["advantages"]) and torch.equal(gradient, -per_token["advantages"])


def test_ppo_statistics_count_the_tokens_that_each_bound_stopped() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0, 4.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    _, stats = ppo_clip(dual_clip=3.0)(ratio.log(), None, {"old_logprobs": torch.zeros(6), "advantages": advantage})
    assert stats["clip_low_mean"].tolist() == [False, True, False, False, False, False]
    assert stats["clip_high_mean"].tolist() == [False, False, False, True, False, False]
    assert stats["dual_clip_mean"].tolist() == [False, False, False, False, False, True]
    torch.testing.assert_close(stats["ratio_max"], ratio)
    torch.testing.assert_close(stats["approx_kl_mean"], ratio - 1 - ratio.log())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_gives_a_finite_loss_and_gradient(advantage: float) -> None:
    per_token = {"old_logprobs": torch.tensor([-500.0, 0.0]), "advantages": torch.full((2,), advantage)}
    value, gradient = value_and_gradient(ppo_clip(dual_clip=3.0), torch.tensor([0.0, -500.0]), per_token)
    assert value.isfinite().all() and gradient.isfinite().all()


def test_a_log_ratio_counts_up_to_20_and_beyond_has_no_gradient() -> None:
    difference = torch.tensor([15.0, 21.0, -15.0, -21.0], dtype=torch.float64)
    per_token = {"old_logprobs": torch.zeros(4), "advantages": torch.tensor([-1.0, -1.0, 1.0, 1.0])}  # none is clipped
    value, gradient = value_and_gradient(ppo_clip(), difference, per_token)
    ratio = difference.clamp(-20, 20).exp()
    torch.testing.assert_close(value, -ratio * per_token["advantages"])
    torch.testing.assert_close(gradient, torch.stack([ratio[0], ratio[1] * 0, -ratio[2], ratio[3] * 0]))


def test_kl_estimators_are_zero_at_the_reference_and_k2_k3_abs_are_never_negative() -> None:
    logprob, per_token = random_tokens()
    for kind in ("k1", "k2", "k3", "abs"):
        at_reference, _ = value_and_gradient(kl(kind=kind, coef=1.0), per_token["ref_logprobs"], per_token)
        assert at_reference.abs().max() == 0
        elsewhere, _ = value_and_gradient(kl(kind=kind, coef=1.0), logprob, per_token)
        assert (elsewhere.min() < 0) == (kind == "k1")


def test_k3_is_an_unbiased_estimate_of_the_divergence() -> None:
    policy, reference = (torch.randn(2, 12, dtype=torch.float64) * 0.7).log_softmax(1)
    value, stats = kl(coef=2.0)(policy, None, {"ref_logprobs": reference})
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * value).sum(), 2 * exact)
    torch.testing.assert_close((policy.exp() * stats["kl_mean"]).sum(), exact)


def test_the_entropy_bonus_rewards_entropy_and_needs_it() -> None:
    entropy = torch.tensor([0.5, 2.0])
    value, _ = entropy_bonus(coef=0.1)(torch.zeros(2), entropy, {})
    assert torch.equal(value, -0.1 * entropy)
    with pytest.raises(
        InvalidInputError, match="entropy_bonus needs the entropy: linear_loss has it by with_entropy=True"
    ):
        entropy_bonus(coef=0.1)(torch.zeros(2), None, {})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ppo_clip(clip_low=1.5), r"ppo_clip: clip_low must be in \[0, 1\]; got 1.5"),
        (lambda: ppo_clip(clip_high=-0.1), "ppo_clip: clip_high must be >= 0; got -0.1"),
        (lambda: ppo_clip(clip_high=math.nan), "clip_high must be >= 0; got nan"),
        (lambda: ppo_clip(dual_clip=1.0), "ppo_clip: dual_clip must be > 1, or None; got 1.0"),
        (lambda: kl(kind="k4", coef=1.0), "kl: kind must be one of k1, k2, k3, abs, .*; got 'k4'"),  # type: ignore[arg-type]
        (lambda: cpgd(drift_coef=math.inf), "cpgd: drift_coef must be a finite number; got inf"),
        (combine, "combine needs at least one loss term"),
    ],
)
def test_a_bad_parameter_is_refused_when_the_term_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_a_missing_entry_is_named_with_the_loss_that_wants_it() -> None:
    with pytest.raises(InvalidInputError, match=r"kl needs per_token\['ref_logprobs'\]; got \['advantages'\]"):
        kl(coef=1.0)(torch.zeros(1), None, {"advantages": torch.zeros(1)})


def test_two_terms_with_the_same_statistic_are_refused() -> None:
    twice = combine(kl(coef=0.1), kl(kind="k1", coef=0.1))
    with pytest.raises(InvalidInputError, match="two terms report kl_mean; rename one of them"):
        twice(torch.zeros(1), None, {"ref_logprobs": torch.zeros(1)})


def test_a_loss_cannot_replace_the_operator_s_mean_of_the_entropy() -> None:
    def reporting(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprob, {"entropy_mean": torch.zeros_like(logprob)}

    logprob, ones = torch.zeros(2, requires_grad=True), torch.ones(2)
    with pytest.raises(InvalidInputError, match="reporting: statistic 'entropy_mean' is the operator's own; rename it"):
        token_loss(logprob, reporting, per_token={}, token_weight=ones, entropy=ones)
    _, stats = token_loss(logprob, reporting, per_token={}, token_weight=ones)
    assert stats["entropy_mean"] == 0
