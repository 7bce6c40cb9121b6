"""How far two right computations of one step may be apart, by the formats and the lengths of what they add up.

Rounding errors of both signs cancel: n of them, each of at most the unit u of its format, come to about ``sqrt(n) u``,
and to more than six times that once in 10^7 (N. Higham and T. Mary, A New Approach to Probabilistic Rounding Error
Analysis, SIAM J. Sci. Comput. 41(5), 2019). Two computations have twice as many. What computes something else is
further apart: with random weights, attention that misses half of a sequence moves log-probabilities by as much as they
spread.

Letters: T tokens of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.bench.case import expect
from rlcore.bench.cases.models import ModelShape

_IN_A_BLOCK = 12
"""Roundings of a token's state one after the other in a block: two norms, the products and the activation between, the
rotation, attention, and two sums."""
_WORST = 6.0
_FLOAT8_UNIT = 2.0**-4
"""The unit of e4m3, whose mantissa has three bits."""
_FLOAT8_OPERANDS = 8
"""Two of each of the four products of a block, which come one after the other."""


class StepNumbers(NamedTuple):
    """Numbers that a contender computed, which any defect of its exchanges changes."""

    logprob_T: Tensor
    """The log-prob of each token after all steps, on the host; 0 of the first one of each sequence."""
    grad_norm: float
    """The norm of the first step's gradients, before they are clipped."""


class Tolerance(NamedTuple):
    """Relative errors of two computations; but for ``norm`` as a root mean square."""

    state: float
    """The error of a token's last hidden state."""
    sums: float
    """The error of sums, which are in float32 whatever else is computed in."""
    norm: float
    """The largest error of the norm of gradients, which takes a forward, one more where blocks are recomputed, a
    backward, and a sum of squares."""


def tolerance(model: ModelShape, dtype: torch.dtype, longest: int, *, float8: bool = False) -> Tolerance:
    """Return that of a model whose longest sequence has so many tokens.

    Args:
        dtype: the one that is computed in.
        float8: one of the two multiplies in float8. What block l adds is 1/l of the variance of the state that it is
            added to, so that the errors of its products count 1 + 1/2 + ... of them together.
    """
    terms = model.layers * (3 * model.hidden + model.inner + model.q + longest) + model.hidden + model.vocabulary
    sums = math.sqrt(2 * terms) * _unit(torch.float32)
    squared = 2 * _IN_A_BLOCK * model.layers * _unit(dtype) ** 2 + sums**2
    if float8:
        squared += _FLOAT8_OPERANDS * (1 + math.log(model.layers)) * _FLOAT8_UNIT**2
    largest = model.hidden * max(model.vocabulary, 2 * model.mlps * model.inner)  # parameter, of fused experts too
    norm = math.sqrt(3 * squared) + _WORST * math.sqrt(largest) * _unit(torch.float32)
    return Tolerance(math.sqrt(squared), sums, norm)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def expect_same(found: StepNumbers, expected: StepNumbers, allowed: Tolerance) -> None:
    """Raise AssertionError unless the two are as near as ``allowed``.

    The spread of log-probabilities is that of logits, which are in proportion to a token's state.
    """
    faults = [*_of_logprobs(found.logprob_T, expected.logprob_T, allowed), *_of_norms(found, expected, allowed.norm)]
    expect(not faults, "; ".join(faults))


def _of_logprobs(found_T: Tensor, expected_T: Tensor, allowed: Tolerance) -> Iterator[str]:
    scored_T = expected_T != 0
    if not torch.equal(found_T != 0, scored_T):
        yield "other tokens have log-probs than elsewhere"
        return
    logprob_S = expected_T[scored_T].double()
    apart_S = (found_T[scored_T] - logprob_S).abs()
    limit = allowed.state * float(logprob_S.std()) + allowed.sums * float(logprob_S.abs().max())
    usual, worst = float(apart_S.square().mean().sqrt()), float(apart_S.max())
    if not (usual <= limit and worst <= _WORST * limit):
        place = int(scored_T.nonzero()[apart_S.argmax()])
        yield (
            f"log-probs are {usual:.2g} nats from those elsewhere (root mean square), and {worst:.2g} at token {place};"
            f" by rounding it is {limit:.2g} and {_WORST * limit:.2g} at most"
        )


def _of_norms(found: StepNumbers, expected: StepNumbers, limit: float) -> Iterator[str]:
    apart = abs(found.grad_norm / expected.grad_norm - 1)
    if not apart <= limit:
        yield (
            f"the norm of gradients is {found.grad_norm:.6g}, and elsewhere {expected.grad_norm:.6g}: {apart:.2g} of it"
            f" apart, and by rounding {limit:.2g} at most"
        )
