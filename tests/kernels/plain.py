"""The operators as formulas of plain torch, in the dtype of what they are given.

In float64 they are the truth, in float32 what an implementation has to be as accurate as: see tests/accuracy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.accuracy import assert_as_accurate, assert_within_rounding

Scores = tuple[Tensor, Tensor]
"""Log-probabilities and entropies."""


def token_scores(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0, keep_mask: Tensor | None = None
) -> Scores:
    """Rows whose target is -100 give 0."""
    is_ignored = targets == -100
    logits = logits.masked_fill(is_ignored[..., None], 0.0)
    if keep_mask is not None:
        logits = logits.masked_fill(~(keep_mask | is_ignored[..., None]), -math.inf)
    centred = logits - logits.detach().amax(-1, keepdim=True)  # so that a common offset costs no digits
    logprobs = (centred / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)).log_softmax(-1)
    logprob = logprobs.gather(-1, targets.masked_fill(is_ignored, 0).long()[..., None]).squeeze(-1)
    finite = logprobs.masked_fill(logprobs == -math.inf, 0.0)  # p ln p is 0 where p is
    entropy = -(logprobs.exp() * finite).sum(-1)
    return logprob.masked_fill(is_ignored, 0.0), entropy.masked_fill(is_ignored, 0.0)


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Scores:
    """Rows whose target is -100 give 0, whatever their hidden states hold."""
    logits = hidden.masked_fill((targets == -100)[:, None], 0.0) @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return token_scores(logits * logit_scale, targets, temperature=temperature)


def doubled(*tensors: Tensor) -> list[Tensor]:
    """Leaves in float64."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def gradients(scores: tuple[Tensor, Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of a sum with another weight for each row, and for log-probability and entropy."""
    logprob, entropy = scores
    slope = torch.linspace(-1, 2, logprob.numel(), dtype=torch.float64, device=logprob.device).view(logprob.shape)
    total = (slope.to(logprob) * logprob).sum()
    if entropy is not None:
        total = total + (slope.cos().to(entropy) * entropy).sum()
    return list(torch.autograd.grad(total, inputs))


def assert_scores_as_accurate(
    found: tuple[Tensor, Tensor | None], formula: Callable[..., Scores], leaves: Sequence[Tensor]
) -> None:
    """Scores and their gradients are as near to the formula in float64 as the formula in float32 is.

    Args:
        found: scores of the ``leaves``.
        formula: takes the leaves in float32, or in float64.
        leaves: of any dtype; a gradient is rounded to that of its leaf.
    """
    wide = doubled(*leaves)
    sides = [(found, leaves), (formula(*(x.float() for x in leaves)), leaves), (formula(*wide), wide)]
    scores = [[x.detach() for x in of] for of, _ in sides]
    slopes = [gradients(of, inputs) for of, inputs in sides]
    assert [x.dtype for x in slopes[0]] == [x.dtype for x in leaves]
    if sum(x.numel() for x in scores[0]) < 16:
        assert_as_accurate(*(one + other for one, other in zip(scores, slopes, strict=True)))
    else:
        assert_as_accurate(*scores, what="scores")
        assert_as_accurate(*slopes, what="gradients")


def assert_equal_in_float64(found: Any, expected: Any, *, terms: int, what: str = "") -> None:
    """Two ways to compute the same in float64: tensors, or sequences or mappings of them.

    Args:
        terms: numbers that are added up on the longest way; none is above a hundred times the largest result.
    """
    if expected is None:
        assert found is None, what
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), what
        for name, value in expected.items():
            assert_equal_in_float64(found[name], value, terms=terms, what=f"{what} {name}")
    elif not isinstance(expected, Tensor):
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal_in_float64(one, other, terms=terms, what=f"{what} {place}")
    elif expected.numel():
        assert found.dtype == torch.float64, what
        largest = float(expected.detach()[expected.isfinite()].abs().max())
        assert_within_rounding(found, expected, terms=2 * terms, magnitude=100 * largest, what=what)
    else:
        assert found.shape == expected.shape, what


def assert_advantages_as_exact(found: Tensor, exact: Tensor, rewards: Tensor) -> None:
    """Those of the kernel, which takes off a mean in two float32 parts, and makes of the differences a variance.

    The parts hold the mean to the square of float32's rounding.
    """
    magnitude = exact.abs() + rewards.abs().amax(-1, keepdim=True) * 2**-24 if rewards.numel() else exact.abs()
    assert_within_rounding(found, exact, terms=rewards.shape[-1] + 8, magnitude=magnitude)


def assert_loss_as_accurate(
    loss: Tensor,
    loss_fn: Callable[..., Any],
    leaves: Sequence[Tensor],
    targets: Tensor,
    tokens: Mapping[str, Any],
    *,
    bias: Tensor | None = None,
    reach: float | None = None,
    **options: Any,
) -> None:
    """A loss is as near to the formula in float64 as rounding allows; its gradients, as the formula in float32 is.

    Args:
        loss: what ``linear_loss`` found for the ``leaves``.
        leaves: hidden states, weight, and a bias if that is differentiated.
        tokens: ``per_token`` and ``token_weight``, in float32.
        bias: one that is not differentiated.
        reach: the largest partial sum of a logit times the sharpness; from the sizes of the leaves if not given.
        options: those of `linear_scores`.
    """

    def formula(dtype: torch.dtype, *inputs: Tensor) -> tuple[Tensor, Scores]:
        head = [x.to(dtype) for x in (inputs if bias is None else (*inputs, bias))]
        scores = linear_scores(*head, targets=targets, **options)
        value, _ = loss_fn(*scores, {name: x.to(dtype) for name, x in tokens["per_token"].items()})
        is_counted = (targets != -100) & (tokens["token_weight"] != 0)
        return torch.where(is_counted, value * tokens["token_weight"].to(dtype), 0.0), scores

    wide = doubled(*leaves)
    (exact_T, scores), (own_T, _) = formula(torch.float64, *wide), formula(torch.float32, *leaves)
    slopes = torch.autograd.grad(exact_T.sum(), scores, retain_graph=True)
    sides = [(loss, leaves), (own_T.sum(), leaves), (exact_T.sum(), wide)]
    assert_as_accurate(*(torch.autograd.grad(of, inputs) for of, inputs in sides), what="gradients")
    # A log-probability is off by roundings of logits, and a value by that times its slope.
    if reach is None:
        sharpness = float((options.get("logit_scale", 1.0) / torch.as_tensor(options.get("temperature", 1.0))).max())
        longest = [float(x.detach()[x.isfinite().all(-1)].float().norm(dim=1).max()) for x in leaves[:2]]
        reach = sharpness * (longest[0] * longest[1] + sum(float(x.detach().abs().max()) for x in leaves[2:]))
    felt = sum(slope.abs().sum() for slope in slopes)
    terms = len(targets) + sum(leaves[1].shape) + 32
    magnitude = exact_T.detach().abs().sum() + (1 + 2 * reach) * felt
    assert_within_rounding(loss, exact_T.sum(), terms=terms, magnitude=magnitude, what="loss")
