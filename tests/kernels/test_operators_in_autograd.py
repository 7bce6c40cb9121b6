"""The ways in which training code calls operators: recomputed, without gradients, with a weight that is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.errors import UnsupportedError
from rlcore.ops import combine, entropy_bonus, linear_logprob, linear_loss, ppo_clip, token_logprob
from tests.accuracy import assert_as_accurate
from tests.kernels.plain import assert_equal_in_float64

T, H, V = 40, 8, 50


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(rows, H, generator=generator).to(dtype).requires_grad_() for rows in (T, V))
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def combined(scores: tuple[Tensor, Tensor | None]) -> Tensor:
    logprob, entropy = scores
    assert entropy is not None
    slope = torch.arange(len(logprob), dtype=logprob.dtype) / T
    return (slope * logprob).sum() + (slope.cos() * entropy).sum()


def from_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return combined(token_logprob(hidden.tanh() @ weight.T, targets, with_entropy=True))


def from_hidden(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return combined(linear_logprob(hidden.tanh(), weight, targets, with_entropy=True))


def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    slope = torch.arange(len(targets), dtype=hidden.dtype) / T
    return linear_loss(
        hidden.tanh(),
        weight,
        targets,
        combine(ppo_clip(), entropy_bonus(coef=0.1)),
        per_token={"old_logprobs": slope - 4, "advantages": slope - 0.3},
        token_weight=slope,
    ).loss


OPERATORS: list[Callable[..., Tensor]] = [from_logits, from_hidden, loss]


def run(function: Callable[..., Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    hidden, weight, targets = random_inputs(dtype)
    value = function(hidden, weight, targets)
    return [value, *torch.autograd.grad(value, (hidden, weight))]


def assert_same(found: Any, expected: Any) -> None:
    """Sums of the same numbers in another order."""
    assert_equal_in_float64(found, expected, terms=T + V)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_inside_an_activation_checkpoint(operator: Callable[..., Tensor], use_reentrant: bool) -> None:
    def checkpointed(*inputs: Tensor) -> Tensor:
        value: Tensor = checkpoint(operator, *inputs, use_reentrant=use_reentrant)
        return value

    hidden, weight, targets = random_inputs()
    found = checkpointed(hidden, weight, targets)
    found.backward()  # a reentrant checkpoint refuses torch.autograd.grad
    want = run(operator)
    assert all(torch.equal(one, other) for one, other in zip((found, hidden.grad, weight.grad), want, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(operator: Callable[..., Tensor], context: Any) -> None:
    with context():
        value = operator(*random_inputs())
    assert not value.requires_grad
    assert_same(value, run(operator)[0])


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_weight_used_twice_gets_both_gradients(operator: Callable[..., Tensor]) -> None:
    def twice(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return operator(hidden, weight, targets) + 2 * operator(hidden.flip(0), weight, targets.flip(0))

    def again(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return operator(hidden.flip(0), weight, targets.flip(0))

    for both, first, second in zip(run(twice), run(operator), run(again), strict=True):
        assert_same(both, first + 2 * second)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tied_weight_gets_both_gradients(operator: Callable[..., Tensor]) -> None:
    _, weight, targets = random_inputs()

    def tied(weight: Tensor, head: Tensor) -> Tensor:
        return operator(torch.nn.functional.embedding(targets.flip(0), weight), head, targets)

    (both,) = torch.autograd.grad(tied(weight, weight), weight)
    (as_embedding,) = torch.autograd.grad(tied(weight, weight.detach()), weight)
    (as_head,) = torch.autograd.grad(tied(weight.detach(), weight), weight)
    assert as_embedding.any() and as_head.any()
    assert_same(both, as_embedding + as_head)


@pytest.mark.parametrize("operator", OPERATORS)
def test_micro_batches_accumulate_into_existing_gradients(operator: Callable[..., Tensor]) -> None:
    hidden, weight, targets = random_inputs()
    weight.grad = before = torch.ones_like(weight)
    for part in (slice(0, 15), slice(15, T)):
        operator(hidden[part], weight, targets[part]).backward()
    assert weight.grad is before  # added to in place
    parts = (slice(0, 15), slice(15, T))
    sums = [torch.autograd.grad(operator(hidden[part], weight, targets[part]), weight)[0] for part in parts]
    assert_same(weight.grad, 1 + sums[0] + sums[1])


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_autocast_region_around_the_backward_changes_nothing(operator: Callable[..., Tensor]) -> None:
    hidden, weight, targets = random_inputs(torch.float32)
    value = operator(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(value, (hidden, weight))
    expected = run(operator, torch.float32)[1:]
    if operator is not from_logits:
        assert all(map(torch.equal, found, expected)), "the same operations in the same dtype"
        return
    # The backward of the product before it is torch's own, and lowered: as where all is.
    lowered = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    rounded = [x.float() for x in torch.autograd.grad(operator(*lowered, targets), lowered)]
    assert_as_accurate(found, rounded, run(operator)[1:])


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_second_derivative_is_refused(operator: Callable[..., Tensor]) -> None:
    hidden, weight, targets = random_inputs()
    value = operator(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(value, weight, create_graph=True)
    assert_same(gradient, run(operator)[2])
    with pytest.raises(UnsupportedError, match="a second derivative of a log-probability or loss operator"):
        gradient.square().sum().backward()


def test_the_references_have_a_second_derivative() -> None:
    hidden, weight, targets = random_inputs()
    scores = linear_logprob(hidden, weight, targets, with_entropy=True, implementation="reference")
    (gradient,) = torch.autograd.grad(combined(scores), weight, create_graph=True)
    gradient.square().sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().max() > 0
