"""The operators as formulas of plain torch, in the dtype of what they are given.

In float64 they are the truth, in float32 what an implementation has to be as accurate as: see tests/accuracy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.accuracy import AS_ACCURATE, assert_as_accurate, assert_within_rounding

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
    sharp = centred / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    # torch.sum adds in pairs; torch.log_softmax, which does not, is off by a hundred roundings of 262,144 columns.
    logprobs = sharp - sharp.exp().sum(-1, keepdim=True).log()
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
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Scores:
    """Rows whose target is -100 give 0, whatever their hidden states hold.

    Args:
        rounded: what an implementation does to the gradient of the logits before it multiplies.
    """
    logits = hidden.masked_fill((targets == -100)[:, None], 0.0) @ weight.T
    logits = logits if bias is None else logits + bias
    if rounded is not None and logits.requires_grad:
        logits.register_hook(rounded)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return token_scores(logits * logit_scale, targets, temperature=temperature)


def in_bfloat16(gradient: Tensor) -> Tensor:
    """Round the gradient of the logits as where it is stored for a product of bfloat16: a value for `rounded`."""
    return gradient.bfloat16().to(gradient.dtype)


def doubled(*tensors: Tensor) -> list[Tensor]:
    """Leaves in float64."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def gradients(scores: tuple[Tensor, Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum with another weight for each row, and for log-probability and entropy."""
    logprob, entropy = scores
    slope = torch.linspace(-1, 2, logprob.numel(), dtype=torch.float64, device=logprob.device).view(logprob.shape)
    total = (slope.to(logprob) * logprob).sum()
    if entropy is not None:
        total = total + (slope.cos().to(entropy) * entropy).sum()
    return list(torch.autograd.grad(total, inputs, retain_graph=True))


def assert_scores_as_accurate(
    found: tuple[Tensor, Tensor | None],
    formula: Callable[..., Scores],
    leaves: Sequence[Tensor],
    *,
    reference: Callable[..., Scores] | None = None,
    factor: float = AS_ACCURATE,
) -> list[Tensor]:
    """Scores and their gradients are as near to the formula in float64 as the formula in float32 is.

    Args:
        found: scores of the ``leaves``.
        formula: takes the leaves in float32, or in float64.
        leaves: logits; or hidden states, weight and possibly a bias, of any dtype: a gradient is rounded to it.
        reference: in float32, in place of the formula.
        factor: how many times the error of its gradients is as accurate.

    Returns:
        The gradients found.
    """
    wide, own = doubled(*leaves), (reference or formula)(*(x.float() for x in leaves))
    sides = [(found, leaves), (own, leaves), (formula(*wide), wide)]
    scores = [[x.detach() for x in of] for of, _ in sides]
    slopes = [gradients(of, inputs) for of, inputs in sides]
    assert [x.dtype for x in slopes[0]] == [x.dtype for x in leaves]
    if sum(x.numel() for x in scores[0]) >= 16:
        assert_as_accurate(*scores, what="scores")
        assert_as_accurate(*slopes, factor=factor, what="gradients")
    else:
        assert_as_accurate(*(one + other for one, other in zip(scores, slopes, strict=True)), factor=factor)
        size = 1 + _reach(leaves) + math.log(leaves[-1].numel()) + scores[2][0].nan_to_num(neginf=0.0).abs().max()
        for got, exact in zip(scores[0], scores[2], strict=True):
            magnitude = (2 * size).expand(exact.shape)
            assert_within_rounding(got, exact, terms=sum(leaves[-1].shape) + 32, magnitude=magnitude, what="scores")
    return slopes[0]


def _reach(leaves: Sequence[Tensor]) -> float:
    """Return what no partial sum of a logit is above; 0 of logits themselves."""
    if len(leaves) == 1:
        return 0.0
    norms = [x.detach()[x.isfinite().all(-1)].float().norm(dim=1).max() for x in leaves[:2]]
    return float(norms[0] * norms[1]) + sum(float(x.detach().abs().max()) for x in leaves[2:])


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
    """Compare with the kernel, which subtracts a mean in two float32 parts, and computes a variance of the differences.

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
    rounded: Callable[[Tensor], Tensor] | None = None,
    factor: float = AS_ACCURATE,
    **options: Any,
) -> None:
    """A loss is as near to the formula in float64 as rounding allows; its gradients, as the formula in float32 is.

    Args:
        loss: what ``linear_loss`` found for the ``leaves``.
        leaves: hidden states, weight, and a bias if that is differentiated.
        tokens: ``per_token`` and ``token_weight``, in float32.
        bias: one that is not differentiated.
        reach: the largest partial sum of a logit times the inverse temperature; from the sizes of the leaves if
            not given.
        rounded: what the implementation does to the gradient of the logits before it multiplies.
        options: those of `linear_scores`.
    """

    def formula(inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Scores]:
        head = [x.to(dtype) for x in (inputs if bias is None else (*inputs, bias))]
        rounding = rounded if dtype == torch.float32 else None
        scores = linear_scores(*head, targets=targets, rounded=rounding, **options)
        return weighted_values(loss_fn, scores, targets, tokens), scores

    wide = doubled(*leaves)
    (own_T, _), (exact_T, scores) = formula(leaves, torch.float32), formula(wide, torch.float64)
    if reach is None:
        inverse_temperature = float(
            (options.get("logit_scale", 1.0) / torch.as_tensor(options.get("temperature", 1.0))).max()
        )
        reach = inverse_temperature * _reach(leaves)
    assert_loss_within_rounding(loss, loss_fn, scores, targets, tokens, terms=sum(leaves[1].shape) + 32, reach=reach)
    sides = [(loss, leaves), (own_T.sum(), leaves), (exact_T.sum(), wide)]
    found = [torch.autograd.grad(of, inputs, retain_graph=True) for of, inputs in sides]
    assert_as_accurate(*found, factor=factor, what="gradients")


def assert_loss_within_rounding(
    loss: Tensor,
    loss_fn: Callable[..., Any],
    scores: Scores,
    targets: Tensor,
    tokens: Mapping[str, Any],
    *,
    terms: int,
    reach: float,
) -> None:
    """A log-probability is off by roundings of logits up to ``reach``, and a value by that times its slope."""
    leaves = doubled(*scores)
    exact_T = weighted_values(loss_fn, leaves, targets, tokens)
    slopes = torch.autograd.grad(exact_T.sum(), leaves, allow_unused=True)
    felt = sum(slope.abs().sum() for slope in slopes if slope is not None)
    magnitude = exact_T.detach().abs().sum() + (1 + 2 * reach) * felt
    assert_within_rounding(loss, exact_T.sum(), terms=len(targets) + terms, magnitude=magnitude, what="loss")


def weighted_values(
    loss_fn: Callable[..., Any], scores: Sequence[Tensor], targets: Tensor, tokens: Mapping[str, Any]
) -> Tensor:
    """Return what adds up to a loss, in the dtype of the scores. A token that does not count is 0 to the loss."""
    dtype, is_counted = scores[0].dtype, (targets != -100) & (tokens["token_weight"] != 0)
    known = [x.masked_fill(~is_counted, 0.0) for x in scores]
    value_T, _ = loss_fn(*known, {name: x.to(dtype) for name, x in tokens["per_token"].items()})
    return torch.where(is_counted, value_T * tokens["token_weight"].to(dtype), 0.0)
