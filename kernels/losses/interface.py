"""What a loss is: any plain PyTorch function of log-probabilities, for ``linear_loss`` and ``token_loss``.

    value, stats = loss_fn(logprob, entropy, per_token)

All are [t] vectors, t the tokens of one chunk: ``logprob`` and ``entropy`` (None if not computed),
``per_token`` what the caller passed (old log-probabilities, advantages, ...), ``value`` the loss of each
token before weighting, and ``stats`` vectors to report, reduced over all tokens by the ending of their name:
``_mean`` (weighted like the loss), ``_sum``, ``_min``, ``_max``. A masked token's entries are 0, and whatever
is computed from them is left out.

The entries that the terms of this folder read, all natural logarithms and without gradient:

    name              log-probability, or else        read by
    old_logprobs      under the policy that ratios    ppo_clip, gspo, gmpo, cispo, cpgd, sapo, dppo,
                      are taken to and clips are      decoupled_ppo, tis, icepop, sequence_mask,
                      around: the sampler's, or the   kl(kind="r*k3")
                      trainer's before its first
                      step on this batch (AReaL and
                      verl: the proximal policy)
    rollout_logprobs  under the policy that sampled,  decoupled_ppo, tis, icepop, sequence_mask
                      as the sampler reported it
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
from typing import final

import torch
from torch import Tensor

from rlcore.arguments import Kind
from rlcore.errors import InvalidInputError
from rlcore.kernels.cu_seqlens import check_edges

PerToken = Mapping[str, Tensor]
TermOutput = tuple[Tensor, dict[str, Tensor]]
LossFn = Callable[[Tensor, Tensor | None, PerToken], TermOutput]


@final
@dataclass(frozen=True)
class sequence_level:  # noqa: N801 (a decorator)
    """Marks a loss that needs whole sequences: ``@sequence_level``.

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
    if torch.compiler.is_compiling():  # a function that was made in compiled code has no signature to ask
        return True
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature to ask
        pass
    return True


LOSS = Kind("a function of (logprob, entropy, per_token), such as ppo_clip(),", _takes_three)


def as_level_of(function: LossFn, *terms: LossFn) -> LossFn:
    """``function``, sequence level if one of the terms that it calls is."""
    return sequence_level(function) if any(isinstance(term, sequence_level) for term in terms) else function


def needed(per_token: PerToken, name: str, loss: str) -> Tensor:
    """``per_token[name]``, or an error that says which loss wants it."""
    if name not in per_token:
        raise InvalidInputError(f"{loss} needs per_token[{name!r}]; got {sorted(per_token) or 'nothing'}")
    return per_token[name]


def checked_edges(cu_seqlens: Tensor | None, per_token: PerToken, operator: str, rows: str) -> Tensor:
    """``cu_seqlens``, but for its values, of ``operator``'s sequence-level loss over ``rows``.

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
