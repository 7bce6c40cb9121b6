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
WORST = 6.0
"""The error of one of many, in units of their root mean square."""
_FLOAT8_ERROR = 2.0**-4 / math.sqrt(3)
"""The root mean square of errors that are uniform within the unit of e4m3, whose mantissa has three bits."""
_FLOAT8_OPERANDS = 14
"""Two of each of the seven products of a block."""


class StepNumbers(NamedTuple):
    """Numbers that a contender computed, which any defect of its exchanges changes."""

    before_T: Tensor
    """The log-prob of each token before the first step, on the host; 0 of the first one of each sequence."""
    logprob_T: Tensor
    """The same after all steps."""
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
    has_same_steps: bool = True
    """Both have the same weights after their steps, to rounding."""


def tolerance(model: ModelShape, dtype: torch.dtype, longest: int, *, float8: bool = False) -> Tolerance:
    """Return that of a model whose longest sequence has so many tokens.

    Args:
        dtype: the one that is computed in.
        float8: one of the two multiplies in float8. The state has the variance v l after l blocks. Block l adds v, and
            to the square E of the state's error v s by its own roundings, and twice E / l, because each factor of a
            gated product has the error of its input. So E grows by 2 E / l + v s from block to block: it is v s l^2,
            and s l of the state's variance. Steps are not the same: weights that have come from a checkpoint in
            bfloat16 stay as they are in bfloat16 until their updates come to half a unit of it. Compiled blocks round
            them to float8 from float32, so that each update tells.
    """
    terms = model.layers * (3 * model.hidden + model.inner + model.q + longest) + model.hidden + model.vocabulary
    sums = math.sqrt(2 * terms) * _unit(torch.float32)
    squared = 2 * _IN_A_BLOCK * model.layers * _unit(dtype) ** 2 + sums**2
    if float8:
        squared += _FLOAT8_OPERANDS * model.layers * _FLOAT8_ERROR**2
    largest = model.hidden * max(model.vocabulary, 2 * model.mlps * model.inner)  # parameter, of fused experts too
    norm = math.sqrt(3 * squared) + WORST * math.sqrt(largest) * _unit(torch.float32)
    return Tolerance(math.sqrt(squared), sums, norm, has_same_steps=not float8)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def expect_same(found: StepNumbers, expected: StepNumbers, allowed: Tolerance) -> None:
    """Raise AssertionError unless the two are as near as ``allowed``.

    The spread of log-probabilities is that of logits, which are in proportion to a token's state.
    """
    pairs = [(found.before_T, expected.before_T)]
    if allowed.has_same_steps:
        pairs.append((found.logprob_T, expected.logprob_T))
    faults = [fault for pair in pairs for fault in _of_logprobs(*pair, allowed)]
    faults += _of_norms(found, expected, allowed.norm)
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
    if not (usual <= limit and worst <= WORST * limit):
        place = int(scored_T.nonzero()[apart_S.argmax()])
        yield (
            f"log-probs are {usual:.2g} nats from those elsewhere (root mean square), and {worst:.2g} at token {place};"
            f" by rounding it is {limit:.2g} and {WORST * limit:.2g} at most"
        )


def _of_norms(found: StepNumbers, expected: StepNumbers, limit: float) -> Iterator[str]:
    apart = abs(found.grad_norm / expected.grad_norm - 1)
    if not apart <= limit:
        yield (
            f"the norm of gradients is {found.grad_norm:.6g}, and elsewhere {expected.grad_norm:.6g}: {apart:.2g} of it"
            f" apart, and by rounding {limit:.2g} at most"
        )
