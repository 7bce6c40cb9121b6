"""The interface of a loss: any plain PyTorch function of log-probabilities, for ``linear_loss`` and ``token_loss``.

    value, stats = loss_fn(logprob, entropy, per_token)

All are [t] vectors, t the tokens of one chunk. ``entropy`` is None if it is not computed. ``per_token`` holds what the
caller passed (old log-probabilities, advantages, ...). ``value`` is the loss of each token before weighting, and
``stats`` holds vectors to report. They are reduced over all tokens by the ending of their name: ``_mean`` (weighted
like the loss, or by the operator's ``stats_weight``), ``_sum``, ``_min``, ``_max``; ``sequence_stats`` of the operator
has means over sequences. The operator sets the entries of a masked token to 0 and leaves out what is computed from
them; no term lets them reach another token. A ratio of probabilities is the exponential of ``log_ratio_to_old``
(``ratio.py``), which bounds it: value and gradient are finite for all finite entries, and where another policy's
log-probability is -inf. That is infinite or NaN in a value which has it without an exponential: in ``kl`` of each kind
but k3 and r*k3, and in ``cpgd``, whose gradient is finite. A NaN that a term reads of a token that counts is one in its
value or a statistic. Engines refuse batches in which a token that counts has either.

The entries that the terms of this folder read, all natural logarithms and without gradient:

    name              log-probability, or else        read by
    old_logprobs      under the policy in the         ppo_clip, gspo, gmpo, cispo, cispo_absolute,
                      denominator of the ratio: the   cpgd, sapo, dppo, decoupled_ppo, tis, icepop,
                      sampler's, or the trainer's     sequence_mask, vespo, opsm, kl(kind="r*k3");
                      before its first step on this   set by on_policy
                      batch (AReaL and verl: the
                      proximal policy)
    rollout_logprobs  under the policy that sampled,  decoupled_ppo, tis, icepop, sequence_mask,
                      as the sampler reported it      opsm(anchor="rollout_logprobs")
                      (the behaviour policy)
    ref_logprobs      under the reference policy      kl
    advantages        the advantage of the token      all but kl and entropy_bonus
    cu_seqlens        [n + 1] int64: where the n      sequence-level terms; the operator sets them
                      sequences of the chunk begin,
                      then t
    token_mask        bool: the token counts          sequence-level terms; the operator sets them
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from rlcore.arguments import Kind
from rlcore.errors import InvalidInputError
from rlcore.kernels.cu_seqlens import check_edges

PerToken = Mapping[str, Tensor]
TermOutput = tuple[Tensor, dict[str, Tensor]]
LossFn = Callable[[Tensor, Tensor | None, PerToken], TermOutput]


class LossOutput(NamedTuple):
    """The result of ``linear_loss``, ``token_loss`` and ``value_loss``."""

    loss: Tensor
    """Scalar, float32 (float64 for float64 inputs), differentiable."""
    stats: dict[str, Tensor]
    """Scalars on the device, without gradient: the loss function's statistics, and ``entropy_mean`` if it has one."""


@final
@dataclass(frozen=True)
class sequence_level:  # noqa: N801 (a decorator)
    """A loss that needs whole sequences; the decorator ``@sequence_level`` makes one.

    Its chunks end where sequences end, and ``per_token`` also holds ``cu_seqlens`` [n + 1] int64, the
    boundaries of the n sequences in the chunk, and ``token_mask`` [t] bool, False for tokens that do not
    count.
    """

    function: LossFn

    def __call__(self, logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        return self.function(logprob, entropy, per_token)


def _takes_three(function: object) -> bool:
    if not callable(function):
        return False
    if torch.compiler.is_compiling():  # a function that was made in compiled code has no signature
        return True
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        pass
    return True


LOSS = Kind("a function of (logprob, entropy, per_token), such as ppo_clip(),", _takes_three)


def as_level_of(function: LossFn, *terms: LossFn) -> LossFn:
    """Return ``function``, as sequence level if one of the terms that it calls is."""
    return sequence_level(function) if any(isinstance(term, sequence_level) for term in terms) else function


def needed(per_token: PerToken, name: str, loss: str) -> Tensor:
    """Return ``per_token[name]``, or raise an error that says which loss needs it."""
    if name not in per_token:
        raise InvalidInputError(f"{loss} needs per_token[{name!r}]; got {sorted(per_token) or 'nothing'}")
    return per_token[name]


def checked_edges(cu_seqlens: Tensor | None, per_token: PerToken, operator: str, rows: str) -> Tensor:
    """Return the ``cu_seqlens`` of ``operator``'s sequence-level loss over ``rows``, checked but for their values.

    Raises:
        InvalidInputError: there are none, they are no [N + 1] integers, or ``per_token`` has what ``operator`` sets.
    """
    taken = [name for name in ("cu_seqlens", "token_mask") if name in per_token]  # torch 2.10 compiles no set & keys
    if taken:
        raise InvalidInputError(f"per_token must not hold {', '.join(taken)}: {operator} sets them; rename yours")
    if cu_seqlens is None:
        raise InvalidInputError(f"a sequence-level loss needs cu_seqlens, the boundaries of the sequences in {rows}")
    check_edges("cu_seqlens", cu_seqlens)
    return cu_seqlens


def joined_statistics(one: dict[str, Tensor], other: dict[str, Tensor], loss: str) -> dict[str, Tensor]:
    clash = sorted(one.keys() & other.keys())
    if clash:
        raise InvalidInputError(f"{loss}: two terms report {', '.join(clash)}; rename one of them")
    return one | other
