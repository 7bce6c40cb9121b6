"""Run a loss function on some tokens: its weighted sum, its gradients and its statistics.

    loss = sum_t weight[t] * value[t]

over the tokens that count. The others are kept out by selection, never by multiplication with 0, so that NaN
in them cannot matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, sequence_level

_ENDINGS = ("_mean", "_sum", "_min", "_max")


class TokenInputs(NamedTuple):
    """What a loss reads besides log-probabilities, and which tokens count."""

    per_token: Mapping[str, Tensor]
    """0 for tokens that do not count"""
    weight: Tensor
    is_counted: Tensor

    @staticmethod
    def of(per_token: Mapping[str, Tensor], weight: Tensor, is_counted: Tensor) -> TokenInputs:
        def counted(values: Tensor) -> Tensor:
            trailing = (1,) * (values.dim() - 1)
            return values.masked_fill(~is_counted.view(-1, *trailing), 0.0) if values.is_floating_point() else values

        return TokenInputs({name: counted(values) for name, values in per_token.items()}, weight, is_counted)

    def at(self, chunk: slice) -> TokenInputs:
        sliced = {name: values[chunk] for name, values in self.per_token.items()}
        return TokenInputs(sliced, self.weight[chunk], self.is_counted[chunk])


def weighted_loss(
    loss_fn: LossFn,
    logprob_T: Tensor,
    entropy_T: Tensor | None,
    tokens: TokenInputs,
    extra: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar loss, differentiable in its inputs, and the statistics of each token.

    Raises:
        InvalidInputError: the loss function returned something else than [t] vectors.
    """
    value_T, stats = loss_fn(logprob_T, entropy_T, {**tokens.per_token, **extra})
    check_vector("its value", value_T, logprob_T, loss_fn)
    for name, values_T in stats.items():
        check_vector(f"statistic {name!r}", values_T, logprob_T, loss_fn)
        if not name.endswith(_ENDINGS):
            raise InvalidInputError(
                f"{loss_name(loss_fn)}: statistic {name!r} must end in one of {', '.join(_ENDINGS)}, "
                "which says how it is reduced over tokens"
            )
    if entropy_T is not None:
        stats = {"entropy_mean": entropy_T} | stats
    kept_T = torch.where(tokens.is_counted, value_T, 0.0)
    return (kept_T * tokens.weight).sum(), stats


def loss_and_gradients(
    loss_fn: LossFn,
    logprob_T: Tensor,
    entropy_T: Tensor | None,
    tokens: TokenInputs,
    extra: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor], Tensor | None, Tensor | None]:
    """Also the gradients for log-probability and entropy: 0 for masked tokens, None if unused."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (logprob_T, entropy_T) if x is not None]
        loss, stats = weighted_loss(loss_fn, inputs[0], (*inputs, None)[1], tokens, extra)
        if not loss.requires_grad:
            raise InvalidInputError(
                f"{loss_name(loss_fn)}: its value depends on neither logprob nor entropy, so nothing can be "
                "learnt; was one of them detached?"
            )
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
    counted = [None if g is None else torch.where(tokens.is_counted, g, 0.0) for g in found]
    return loss.detach(), stats, counted[0], (*counted, None)[1]


class Statistics:
    """Collects statistics of tokens, and reduces them once, by the ending of their names, without waiting."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self._tokens: list[TokenInputs] = []

    def add(self, stats: Mapping[str, Tensor], tokens: TokenInputs) -> None:
        self._tokens.append(tokens)
        for name, values_T in stats.items():
            self._values.setdefault(name, []).append(values_T.detach().to(tokens.weight.dtype))

    def result(self) -> dict[str, Tensor]:
        """Scalars by name. Of no tokens a sum is 0, a mean NaN, a minimum inf and a maximum -inf."""
        is_counted_T = torch.cat([tokens.is_counted for tokens in self._tokens])
        weight_T = torch.cat([tokens.weight for tokens in self._tokens]).masked_fill(~is_counted_T, 0.0)
        return {name: _reduced(name, torch.cat(parts), weight_T, is_counted_T) for name, parts in self._values.items()}


def _reduced(name: str, values_T: Tensor, weight_T: Tensor, is_counted_T: Tensor) -> Tensor:
    if name.endswith(("_min", "_max")):
        nothing = float("inf") if name.endswith("_min") else float("-inf")
        # one more element, so that no token at all is no error
        kept_T = torch.nn.functional.pad(torch.where(is_counted_T, values_T, nothing), (0, 1), value=nothing)
        return kept_T.amin() if name.endswith("_min") else kept_T.amax()
    kept_T = torch.where(is_counted_T, values_T, 0.0)
    return (kept_T * weight_T).sum() / weight_T.sum() if name.endswith("_mean") else kept_T.sum()


def check_vector(what: str, values: object, logprob_T: Tensor, loss_fn: LossFn) -> None:
    if not isinstance(values, Tensor) or values.shape != logprob_T.shape:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InvalidInputError(
            f"{loss_name(loss_fn)}: {what} must be a vector like logprob, {list(logprob_T.shape)}; got {got}. "
            "Return the loss of each token; linear_loss weights and sums it"
        )


def loss_name(loss_fn: LossFn) -> str:
    function = loss_fn.function if isinstance(loss_fn, sequence_level) else loss_fn
    return f"loss function {getattr(function, '__qualname__', type(function).__name__)}"
