from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import combine, entropy_bonus, kl, ppo_clip, token_loss
from tests.accuracy import assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64


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


def test_ppo_statistics_count_the_tokens_that_each_bound_stopped() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0, 4.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    _, stats = ppo_clip(dual_clip=3.0)(ratio.log(), None, {"old_logprobs": torch.zeros(6), "advantages": advantage})
    assert stats["clip_low_mean"].tolist() == [False, True, False, False, False, False]
    assert stats["clip_high_mean"].tolist() == [False, False, False, True, False, False]
    assert stats["dual_clip_mean"].tolist() == [False, False, False, False, False, True]
    exact = ratio.double()
    # Of numbers up to 4: a logarithm, an exponential, and what is taken off.
    assert_within_rounding(stats["ratio_max"], exact, terms=16)
    assert_within_rounding(stats["approx_kl_mean"], exact - 1 - exact.log(), terms=16, magnitude=2 * exact + 1)


def test_a_log_ratio_counts_up_to_20_and_beyond_has_no_gradient() -> None:
    difference = torch.tensor([15.0, 21.0, -15.0, -21.0], dtype=torch.float64)
    per_token = {"old_logprobs": torch.zeros(4), "advantages": torch.tensor([-1.0, -1.0, 1.0, 1.0])}  # none is clipped
    value, gradient = value_and_gradient(ppo_clip(), difference, per_token)
    ratio = difference.clamp(-20, 20).exp()
    assert_within_rounding(value, -ratio * per_token["advantages"], terms=16)
    assert_within_rounding(gradient, torch.stack([ratio[0], ratio[1] * 0, -ratio[2], ratio[3] * 0]), terms=16)


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
    assert_equal_in_float64((policy.exp() * value).sum(), 2 * exact, terms=12)
    assert_equal_in_float64((policy.exp() * stats["kl_mean"]).sum(), exact, terms=12)


def test_the_entropy_bonus_rewards_entropy_and_needs_it() -> None:
    entropy = torch.tensor([0.5, 2.0])
    value, _ = entropy_bonus(coef=0.1)(torch.zeros(2), entropy, {})
    assert torch.equal(value, -0.1 * entropy)
    with pytest.raises(
        InvalidInputError, match="entropy_bonus needs the entropy: linear_loss has it by with_entropy=True"
    ):
        entropy_bonus(coef=0.1)(torch.zeros(2), None, {})


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
