"""Evaluation of a loss function on tokens: its value, its gradients and its statistics.

    loss = sum_t weight[t] * value[t]

over the tokens that count. The others are left out by selection, never by multiplication with 0, so that NaN in them
has no effect.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from rlcore.errors import InvalidInputError
from rlcore.kernels.chunks import joined
from rlcore.kernels.cu_seqlens import rising_edges
from rlcore.kernels.losses.interface import LossFn, LossOutput, TermOutput, joined_statistics, sequence_level
from rlcore.kernels.losses.sequences import sequence_mean, sequence_sum
from rlcore.kernels.operands import check_constant, check_float, check_same_device, check_shape, check_tensor
from rlcore.settings import is_debugging


class SequenceStatistics(NamedTuple):
    """The statistics of which the mean over each sequence is reported, too."""

    names: tuple[str, ...]
    cu_seqlens: Tensor
    """[N + 1] int64, over all tokens: chunks need not end where sequences do."""

    @staticmethod
    def of(names: Sequence[str], cu_seqlens: Tensor | None, rows: Tensor, what: str) -> SequenceStatistics | None:
        """Return them for the sequences in ``rows``, called ``what`` in messages; None if nothing is asked for.

        Raises:
            InvalidInputError: a name is none of a mean, or the boundaries are not given, or not those of the rows.
        """
        if not names:
            return None
        wrong = [name for name in names if not (isinstance(name, str) and name.endswith("_mean"))]
        if wrong:
            raise InvalidInputError(f"sequence_stats must be names of statistics that end in _mean; got {wrong[0]!r}")
        if cu_seqlens is None:
            raise InvalidInputError(f"sequence_stats needs cu_seqlens, the boundaries of the sequences in {what}")
        if not torch.compiler.is_compiling():
            rising_edges("cu_seqlens", cu_seqlens, len(rows))
        return SequenceStatistics(tuple(names), cu_seqlens.to(rows.device, torch.int64, non_blocking=True))

    def reduced(self, values: Mapping[str, Tensor], tokens: TokenInputs) -> dict[str, Tensor]:
        entries = {"cu_seqlens": self.cu_seqlens, "token_mask": tokens.is_counted}
        count_T = sequence_sum(torch.ones_like(tokens.stats_weight), entries)
        once = tokens._replace(stats_weight=torch.where(tokens.is_counted, 1 / count_T, 0.0))  # each sequence counts 1
        found: dict[str, Tensor] = {}
        for name in self.names:
            if name not in values:
                means = ", ".join(each for each in values if each.endswith("_mean")) or "none"
                raise InvalidInputError(f"sequence_stats names {name!r}, and the means of this loss are {means}")
            mean_T, stem = sequence_mean(values[name], entries), name.removesuffix("_mean")
            found |= {
                f"{stem}_sequence{ending}": reduced(mean_T, once)
                for ending, reduced in _REDUCTIONS.items()
                if ending != "_sum"
            }
        return found


class TokenInputs(NamedTuple):
    """The tensors that a loss reads besides log-probabilities, and which tokens count."""

    per_token: Mapping[str, Tensor]
    """Copies, so that the loss function may write to them; 0 for tokens that do not count."""
    weight: Tensor
    """[T]; 0 for tokens that do not count."""
    is_counted: Tensor
    """[T] bool."""
    stats_weight: Tensor
    """[T], by which ``_mean`` statistics are averaged; 0 for tokens that do not count."""
    sequences: SequenceStatistics | None = None
    """The sequences are those of all tokens; None in a chunk."""

    @staticmethod
    def of(
        per_token: Mapping[str, Tensor],
        weight: Tensor,
        is_counted: Tensor,
        stats_weight: Tensor | None = None,
        sequences: SequenceStatistics | None = None,
    ) -> TokenInputs:
        is_left_out = ~is_counted

        def counted(values: Tensor) -> Tensor:
            trailing = (1,) * (values.dim() - 1)
            return values.masked_fill(is_left_out.view(-1, *trailing), 0)

        entries = {name: counted(values) for name, values in per_token.items()}
        of_stats = weight if stats_weight is None else counted(stats_weight.detach().to(weight.dtype))
        return TokenInputs(entries, weight, is_counted, of_stats, sequences)

    def at(self, chunk: slice) -> TokenInputs:
        sliced = {name: values[chunk] for name, values in self.per_token.items()}
        return TokenInputs(sliced, self.weight[chunk], self.is_counted[chunk], self.stats_weight[chunk])


def token_values(
    loss_fn: LossFn,
    logprob_T: Tensor,
    entropy_T: Tensor | None,
    tokens: TokenInputs,
    extra: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, before weighting, and its statistics.

    Those of tokens that do not count may hold any value.

    Raises:
        InvalidInputError: the loss function returned something else than [t] vectors.
    """
    value_T, stats = checked_output(loss_fn(logprob_T, entropy_T, {**tokens.per_token, **extra}), logprob_T, loss_fn)
    for name in stats:
        if not str(name).endswith(tuple(_REDUCTIONS)):
            raise InvalidInputError(
                f"{loss_name(loss_fn)}: statistic {name!r} must end in one of {', '.join(_REDUCTIONS)}, "
                "which says how it is reduced over tokens"
            )
    if entropy_T is not None:
        if "entropy_mean" in stats:
            raise InvalidInputError(f"{loss_name(loss_fn)}: statistic 'entropy_mean' is the operator's own; rename it")
        stats = {"entropy_mean": entropy_T} | stats
    return value_T, stats


def values_and_gradients(
    loss_fn: LossFn,
    logprob_T: Tensor,
    entropy_T: Tensor | None,
    tokens: TokenInputs,
    extra: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor], Tensor | None, Tensor | None]:
    """Return also the gradients of the weighted sum for log-probability and entropy: None if unused."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (logprob_T, entropy_T) if x is not None]
        value_T, stats = token_values(loss_fn, inputs[0], (*inputs, None)[1], tokens, extra)
        if not value_T.requires_grad:
            raise InvalidInputError(
                f"{loss_name(loss_fn)}: its value depends on neither logprob nor entropy, so nothing can be "
                "learnt; was one of them detached?"
            )
        if is_debugging():
            _check_leaves(value_T, inputs, loss_fn)
        # The sum itself is computed after all chunks: its kernels and those of its gradient would delay the products.
        found = torch.autograd.grad(value_T, inputs, tokens.weight.to(value_T.dtype), allow_unused=True)
    return value_T.detach(), stats, found[0], (*found, None)[1]


def _check_leaves(value_T: Tensor, inputs: list[Tensor], loss_fn: LossFn) -> None:
    for leaf in _leaves(value_T):
        if all(leaf is not known for known in inputs):
            raise InvalidInputError(
                f"{loss_name(loss_fn)}: its value depends on a tensor {list(leaf.shape)} {leaf.dtype} that requires "
                "grad, but gradients flow to logprob and entropy alone; detach it, or pass the log-probabilities of "
                "linear_logprob to token_loss, which gives it one"
            )


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the tensors to whose ``.grad`` a backward of ``value`` would add."""
    waiting, seen = [get_gradient_edge(value).node], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, _node_of_leaves()):
            yield node.variable  # type: ignore[attr-defined]
        seen.add(node)
        waiting += [before for before, _ in node.next_functions if before is not None and before not in seen]


@functools.cache
def _node_of_leaves() -> type:
    return type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


def weighted_sum(value_T: Tensor, tokens: TokenInputs) -> Tensor:
    return (torch.where(tokens.is_counted, value_T, 0.0) * tokens.weight).sum()


def loss_of_tokens(
    loss_fn: LossFn, logprob_T: Tensor, entropy_T: Tensor | None, tokens: TokenInputs, extra: Mapping[str, Tensor]
) -> LossOutput:
    """Compute the loss of all tokens at once, differentiable by autograd."""
    value_T, stats = token_values(loss_fn, logprob_T, entropy_T, tokens, extra)
    statistics = Statistics()
    statistics.add(stats)
    return LossOutput(weighted_sum(value_T, tokens), statistics.result(tokens))


class Statistics:
    """The statistics of tokens, reduced once at the end by the ending of their names. Nothing waits for the device."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, stats: Mapping[str, Tensor]) -> None:
        for name, values_T in stats.items():
            self._values.setdefault(name, []).append(values_T.detach())

    def result(self, tokens: TokenInputs) -> dict[str, Tensor]:
        """Return scalars by name, of all ``tokens``. Of none: sum 0, mean NaN, minimum inf, maximum -inf."""
        values = {name: joined(parts).to(tokens.weight.dtype) for name, parts in self._values.items()}
        found: dict[str, Tensor] = {}
        for ending, reduced in _REDUCTIONS.items():
            names = [name for name in values if name.endswith(ending)]
            if torch.compiler.is_compiling():  # it fuses the reductions of vectors, but writes a stack of them
                found |= {name: reduced(values[name], tokens) for name in names}
            elif names:
                found |= zip(names, reduced(torch.stack([values[name] for name in names]), tokens), strict=True)
        of_sequences = {} if tokens.sequences is None else tokens.sequences.reduced(values, tokens)
        return joined_statistics({name: found[name] for name in values}, of_sequences, "sequence_stats")


def _mean(values: Tensor, tokens: TokenInputs) -> Tensor:
    return (torch.where(tokens.is_counted, values, 0.0) * tokens.stats_weight).sum(-1) / tokens.stats_weight.sum()


def _sum(values: Tensor, tokens: TokenInputs) -> Tensor:
    return torch.where(tokens.is_counted, values, 0.0).sum(-1)


def _min(values: Tensor, tokens: TokenInputs) -> Tensor:
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], math.inf)
    return torch.where(tokens.is_counted, values, math.inf).amin(-1)


def _max(values: Tensor, tokens: TokenInputs) -> Tensor:
    return -_min(-values, tokens)


_REDUCTIONS: dict[str, Callable[[Tensor, TokenInputs], Tensor]] = {
    "_mean": _mean,
    "_sum": _sum,
    "_min": _min,
    "_max": _max,
}


def check_tokens(
    name: str,
    rows: Tensor,
    per_token: Mapping[str, Tensor],
    token_weight: Tensor,
    stats_weight: Tensor | None = None,
) -> None:
    """Check the arguments of a loss. ``rows``, called ``name`` in messages, has one entry for each token.

    Raises:
        InvalidInputError: numbers of tokens, devices or dtypes differ, or a tensor would silently get no gradient.
    """
    check_float("token_weight", token_weight)
    if token_weight.shape != rows.shape[:1]:
        raise InvalidInputError(
            f"token_weight must be [T] = {[len(rows)]}; got {list(token_weight.shape)}. See rlcore.ops.token_weights"
        )
    if stats_weight is not None:
        check_tensor("stats_weight", stats_weight)
        check_shape("stats_weight", stats_weight, tuple(rows.shape[:1]), f"one number for each row of {name}")
        check_same_device(name, rows.device, stats_weight=stats_weight)
    for entry, values in per_token.items():
        check_tensor(f"per_token[{entry!r}]", values)
        if values.shape[:1] != rows.shape[:1]:
            raise InvalidInputError(
                f"per_token[{entry!r}] must have one entry for each of the {len(rows)} rows of {name}; "
                f"got {list(values.shape)}. Repeat per-sequence values for each of their tokens"
            )
    named = {f"per_token[{entry!r}]": values for entry, values in per_token.items()}
    check_same_device(name, rows.device, token_weight=token_weight, **named)
    for entry, values in {"token_weight": token_weight, **named}.items():
        check_constant(entry, values)


def flat_tokens(
    rows: Tensor, per_token: Mapping[str, Tensor], token_weight: Tensor, stats_weight: Tensor | None
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Join the dimensions of the entries to one, where ``rows`` has several.

    Raises:
        InvalidInputError: an entry does not begin with the dimensions of ``rows``.
    """

    def flat(name: str, values: Tensor) -> Tensor:
        check_tensor(name, values)
        if values.shape[: rows.dim()] != rows.shape:
            raise InvalidInputError(
                f"{name} must begin with the dimensions of targets, {list(rows.shape)}; got {list(values.shape)}"
            )
        return values.flatten(0, rows.dim() - 1)

    flattened = {entry: flat(f"per_token[{entry!r}]", values) for entry, values in per_token.items()}
    of_stats = None if stats_weight is None else flat("stats_weight", stats_weight)
    return flattened, flat("token_weight", token_weight), of_stats


def checked_output(found: object, logprob_T: Tensor, loss_fn: LossFn) -> TermOutput:
    """Check that a loss function returned a value and statistics that are vectors like ``logprob``; return them."""
    if not (isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping)):
        types = [type(x).__name__ for x in found] if isinstance(found, tuple | list) else type(found).__name__
        raise InvalidInputError(
            f"{loss_name(loss_fn)} must return (value, stats), "
            f"a vector and a dict of vectors to report, {{}} for none; got {types}"
        )
    value_T, stats = found
    _check_vector("its value", value_T, logprob_T, loss_fn)
    for name, values_T in stats.items():
        _check_vector(f"statistic {name!r}", values_T, logprob_T, loss_fn)
    return value_T, stats


def _check_vector(what: str, values: object, logprob_T: Tensor, loss_fn: LossFn) -> None:
    if not isinstance(values, Tensor) or values.shape != logprob_T.shape or values.is_complex():
        got = str(list(values.shape)) if isinstance(values, Tensor) else type(values).__name__
        got += f" of {values.dtype}" if isinstance(values, Tensor) and values.is_complex() else ""
        raise InvalidInputError(
            f"{loss_name(loss_fn)}: {what} must be a vector like logprob, {list(logprob_T.shape)}; got {got}. "
            "Return the loss of each token; the operator weights and sums it"
        )


def loss_name(loss_fn: LossFn) -> str:
    function = inspect.unwrap(loss_fn.function if isinstance(loss_fn, sequence_level) else loss_fn)
    return f"loss function {getattr(function, '__qualname__', type(function).__name__)}"
