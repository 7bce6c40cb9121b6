"""Advantages and returns of sequences of rewards.

Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438), over the tokens that count:

    delta_t = reward_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lam A_t+1        return_t = A_t + V_t

and the discounted return R_t = reward_t + gamma R_t+1, with nothing after the last token. Tokens that do not count
(prompts, answers of a tool, padding) are treated as if deleted: rewards and values pass over them undiscounted, and
their values have no influence. They get 0 themselves. verl 0.9.1 treats dialogues with several turns in this way; the
tests compare with deletion.

Both are linear recurrences a_t = x_t + c_t a_t+1 in which c_t is 0 at the last token of a sequence, and 1 (with x_t =
0) where a token does not count. Composing neighbours, (c, x) o (c', x') = (c c', x + c x'), halves the problem: one
scan of logarithmic depth serves all sequences, however long, and nothing waits for the device.

An implementation takes packed tokens as the caller gave them; those that do not count may hold any value. It checks the
values, by ``check_tokens`` or on the device. ``triton_scan`` has the implementation in Triton.

Letters: T tokens, N sequences.
Order of this file: references, scans, public operators, checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.arguments import AT_LEAST_0, FLAG, NUMBER, optional, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.cu_seqlens import check_edges, rising_edges
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.operands import TENSOR, check_float, check_mask, check_same_device, check_values, first_violation
from rlcore.kernels.softmax_rows import wide_dtype


class Advantages(NamedTuple):
    """The result of ``gae``."""

    advantages: Tensor
    """Shape of the rewards, float32 (float64 for float64 inputs), without gradient."""
    returns: Tensor
    """The same: advantages + values, what a critic learns."""


# --------------------------------------------------------------------------------------------- references


def gae_reference(
    values_T: Tensor, rewards_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute the definition, token by token."""
    tokens = check_tokens("gae", mask_T, cu_seqlens, {"values": values_T, "rewards": rewards_T})
    (values_T, rewards_T), mask_T, cu_seqlens = tokens
    advantages_T, returns_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        advantage = next_value = values_T.new_zeros(())
        for t in reversed(range(start, stop)):
            if mask_T[t]:
                advantage = rewards_T[t] + gamma * next_value - values_T[t] + gamma * lam * advantage
                next_value = values_T[t]
                advantages_T[t], returns_T[t] = advantage, advantage + next_value
    return advantages_T, returns_T


def discounted_return_reference(
    rewards_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor, *, gamma: float
) -> Tensor:
    """Compute the definition, token by token."""
    tokens = check_tokens("discounted_return", mask_T, cu_seqlens, {"rewards": rewards_T})
    (rewards_T,), mask_T, cu_seqlens = tokens
    returns_T = torch.zeros_like(rewards_T)
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        following = rewards_T.new_zeros(())
        for t in reversed(range(start, stop)):
            if mask_T[t]:
                returns_T[t] = following = rewards_T[t] + gamma * following
    return returns_T


# -------------------------------------------------------------------------------------------------- scans


def gae_scan(
    values_T: Tensor, rewards_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute by one scan of what a token passes on, gamma (V_t + lam A_t), in plain torch on any device."""
    tokens = check_tokens("gae", mask_T, cu_seqlens, {"values": values_T, "rewards": rewards_T})
    (values_T, rewards_T), mask_T, cu_seqlens = tokens
    is_last_T = _is_last(cu_seqlens, len(mask_T))
    surprise_T = rewards_T - values_T
    passed_T = _reverse_scan(
        _factor(mask_T, is_last_T, gamma * lam, values_T.dtype), gamma * (values_T + lam * surprise_T)
    )
    taken_T = _shifted(passed_T).masked_fill(is_last_T, 0.0)
    advantages_T = torch.where(mask_T, surprise_T + taken_T, 0.0)
    return advantages_T, advantages_T + values_T


def discounted_return_scan(rewards_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """Compute by one scan, in plain torch on any device."""
    tokens = check_tokens("discounted_return", mask_T, cu_seqlens, {"rewards": rewards_T})
    (rewards_T,), mask_T, cu_seqlens = tokens
    factor_T = _factor(mask_T, _is_last(cu_seqlens, len(mask_T)), gamma, rewards_T.dtype)
    return torch.where(mask_T, _reverse_scan(factor_T, rewards_T), 0.0)


def _is_last(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return [T] bool: the token is the last of its sequence."""
    is_edge = torch.zeros(num_tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    return is_edge.index_fill(0, cu_seqlens, True)[1:]


def _factor(mask_T: Tensor, is_last_T: Tensor, counted: float, dtype: torch.dtype) -> Tensor:
    factor_T = torch.ones_like(mask_T, dtype=dtype).masked_fill(mask_T, counted)
    return factor_T.masked_fill(is_last_T, 0.0)


def _shifted(values_T: Tensor) -> Tensor:
    """Return the value of the next token at each; 0 after the end."""
    return torch.nn.functional.pad(values_T[1:], (0, 1))


def _reverse_scan(factor_T: Tensor, term_T: Tensor) -> Tensor:
    """Return a with a[t] = term[t] + factor[t] * a[t + 1], and 0 after the end; linear work, logarithmic depth."""
    count = len(term_T)
    if count <= 1:
        return term_T
    pairs = [torch.nn.functional.pad(x, (0, count % 2)).view(-1, 2).unbind(1) for x in (factor_T, term_T)]
    (even_factor, odd_factor), (even_term, odd_term) = pairs
    even = _reverse_scan(even_factor * odd_factor, even_term + even_factor * odd_term)
    odd = odd_term + odd_factor * _shifted(even)
    return torch.stack((even, odd), 1).flatten()[:count]


# --------------------------------------------------------------------------------------- public operators


@takes("gae", mask=optional(TENSOR), gamma=NUMBER, lam=NUMBER, cu_seqlens=optional(TENSOR))
@torch.no_grad()
def gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    cu_seqlens: Tensor | None = None,
    implementation: str | None = None,
) -> Advantages:
    """Compute generalised advantage estimates with a critic.

    Args:
        values: [N, L], or packed [T]; any float dtype. The critic's value before each token.
        rewards: the same shape; any float dtype. For a response cut off at its length limit add ``gamma`` times the
            value of what would follow to its last reward.
        mask: the same shape; nonzero for tokens that count. None counts all.
        gamma: discount, in [0, 1].
        lam: in [0, 1]; 1 has the least bias, 0 the least variance.
        cu_seqlens: [N + 1] integers from 0 to T, needed if and only if packed.
        implementation: run this one or raise; None chooses.

    Returns:
        ``(advantages, returns)``; 0 at tokens that do not count. Whitening is up to the caller: ``masked_whiten``.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above; values or rewards that are not finite
            where a token counts.
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        _check_unit("gae", name, factor)
    tokens = _Tokens.of("gae", mask, cu_seqlens, values=values, rewards=rewards)
    run = choose("gae", tokens.query(), implementation).fn
    found = run(*tokens.values, tokens.mask, tokens.cu_seqlens, gamma=gamma, lam=lam)
    return Advantages(*(x.view(rewards.shape) for x in found))


@takes("discounted_return", mask=optional(TENSOR), gamma=NUMBER, cu_seqlens=optional(TENSOR))
@torch.no_grad()
def discounted_return(
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    cu_seqlens: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Compute the discounted sum of this and all later rewards of the sequence.

    Args:
        rewards: [N, L], or packed [T]; any float dtype.
        mask: the same shape; nonzero for tokens that count. None counts all.
        gamma: discount, in [0, 1].
        cu_seqlens: [N + 1] integers from 0 to T, needed if and only if packed.
        implementation: run this one or raise; None chooses.

    Returns:
        Shape of the rewards, float32 (float64 for float64 rewards); 0 at tokens that do not count.

    Raises:
        InvalidInputError: as ``gae``.
    """
    _check_unit("discounted_return", "gamma", gamma)
    tokens = _Tokens.of("discounted_return", mask, cu_seqlens, rewards=rewards)
    run = choose("discounted_return", tokens.query(), implementation).fn
    found: Tensor = run(*tokens.values, tokens.mask, tokens.cu_seqlens, gamma=gamma)
    return found.view(rewards.shape)


@takes("masked_whiten", mask=TENSOR, keep_mean=FLAG, epsilon=AT_LEAST_0)
def masked_whiten(values: Tensor, mask: Tensor, *, keep_mean: bool = False, epsilon: float = 1e-8) -> Tensor:
    """Compute ``(values - mean) / sqrt(variance + epsilon)`` over the tokens that count; the variance is unbiased.

    Args:
        values: any shape, any float dtype. On several ranks gather first: the moments are of these tokens alone.
        mask: the same shape; nonzero for tokens that count.
        keep_mean: add the mean again, so that only the scale changes.
        epsilon: keeps equal values finite.

    Returns:
        Shape of the values, float32 (float64 for float64 values); 0 at tokens that do not count, and one that counts
        alone is at the mean.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above.
    """
    check_float("masked_whiten: values", values)
    _check_like("masked_whiten", "values", values, mask=mask)
    check_mask("masked_whiten: mask", mask)
    is_counted = mask != 0
    x = torch.where(is_counted, values, 0.0).to(wide_dtype(values.dtype))
    count = is_counted.sum()
    mean = x.sum() / count.clamp(min=1)
    # Once more: of equal values the rounding of a sum would be left, and the scale would make it large.
    mean = mean + torch.where(is_counted, x - mean, 0.0).sum() / count.clamp(min=1)
    centred = torch.where(is_counted, x - mean, 0.0)
    whitened = centred * (centred.square().sum() / (count - 1).clamp(min=1) + epsilon).rsqrt()
    return torch.where(is_counted, whitened + mean, 0.0) if keep_mean else whitened


# ------------------------------------------------------------------------------------------------- checks


class _Tokens(NamedTuple):
    """Packed inputs of any float dtypes."""

    values: tuple[Tensor, ...]
    mask: Tensor | None
    cu_seqlens: Tensor

    @classmethod
    def of(cls, op: str, mask: Tensor | None, cu_seqlens: Tensor | None, **values: Tensor) -> _Tokens:
        (first_name, first), *_ = values.items()
        for name, tensor in values.items():
            check_float(f"{op}: {name}", tensor)
        _check_like(op, first_name, first, mask=mask, **values)
        if mask is not None:
            check_mask(f"{op}: mask", mask)
        edges_N = _edges(op, first_name, first, cu_seqlens)
        mask_T = None if mask is None else mask.reshape(-1).contiguous()
        return cls(tuple(x.detach().reshape(-1).contiguous() for x in values.values()), mask_T, edges_N)

    def query(self) -> Query:
        dtypes = {x.dtype for x in self.values}
        dtype = torch.float64 if torch.float64 in dtypes else self.values[0].dtype
        return Query(self.values[0].device.type, dtype, 0, 0)


def _edges(op: str, name: str, values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return [N + 1] integers on the device of the values; the rows of a padded batch are its sequences."""
    if (values.dim(), cu_seqlens is None) not in {(2, True), (1, False)}:
        given = "no cu_seqlens" if cu_seqlens is None else "cu_seqlens"
        raise InvalidInputError(
            f"{op}: {name} must be [N, L], or packed [T] with cu_seqlens; got {list(values.shape)} and {given}"
        )
    if cu_seqlens is None:
        return torch.arange(len(values) + 1, device=values.device) * values.shape[1]
    check_edges(f"{op}: cu_seqlens", cu_seqlens)
    return cu_seqlens.to(values.device, non_blocking=True).contiguous()


def check_tokens(
    op: str, mask_T: Tensor | None, cu_seqlens: Tensor, values: Mapping[str, Tensor]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the values in the wide dtype, 0 for tokens that do not count; which tokens count; int64 ``cu_seqlens``.

    Raises:
        InvalidInputError: values that are not finite where a token counts, ``cu_seqlens`` that do not rise from 0 to T.
    """
    (first, *_), num_tokens = values.values(), len(next(iter(values.values())))
    is_counted_T = torch.ones_like(first, dtype=torch.bool) if mask_T is None else mask_T != 0
    wide = wide_dtype(torch.float64 if any(x.dtype == torch.float64 for x in values.values()) else first.dtype)
    known = {name: torch.where(is_counted_T, x, 0.0).to(wide) for name, x in values.items()}
    for name, x in known.items():
        _check_finite(op, name, x)
    return list(known.values()), is_counted_T, rising_edges(f"{op}: cu_seqlens", cu_seqlens, num_tokens)


def _check_like(op: str, first_name: str, first: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != first.shape:
            raise InvalidInputError(
                f"{op}: {name} must have the shape of {first_name}, {list(first.shape)}; got {list(tensor.shape)}"
            )
    check_same_device(first_name, first.device, **others)


def _check_finite(op: str, name: str, values: Tensor) -> None:
    is_finite = values.isfinite()
    check_values(
        is_finite,
        lambda: f"{op}: {name} must be finite where a token counts; got {first_violation(is_finite, values)}",
    )


def _check_unit(op: str, name: str, factor: Any) -> None:
    if not 0 <= factor <= 1:
        raise InvalidInputError(f"{op}: {name} must be in [0, 1]; got {factor}")
