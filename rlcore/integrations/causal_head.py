"""The output head of a transformers model: log-probabilities of labels from hidden states, without logits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore.errors import UnsupportedError
from rlcore.logit_form import measure_logit_form
from rlcore.ops import Logprobs, linear_logprob

IGNORED = -100
"""The label of positions that do not count, as in transformers."""


class CausalHead:
    """Computes what the logits of ``model`` would give, in the form that is measured on its own forward.

    Args:
        model: a causal language model of transformers, on any device and not sharded yet. Its weight is read at each
            call, because FSDP and PEFT replace it.
        temperature: > 0; the logits are divided by it.
        in_float32: compute the product in float32, whatever autocast says.

    Raises:
        UnsupportedError: the logits are another function of the hidden states, or the head has an adapter, which
            ``linear_logprob`` would leave out.
    """

    def __init__(self, model: torch.nn.Module, *, temperature: float = 1.0, in_float32: bool = False) -> None:
        self._model, self._temperature, self._in_float32 = model, temperature, in_float32
        self._weights()  # refuses adapters
        try:
            self._form = measure_logit_form(model, type(model).forward)
        except UnsupportedError as error:
            error.add_note("The model is as it was: without rlcore's call the trainer scores it by its own head.")
            raise

    def of(self, model: torch.nn.Module) -> CausalHead:
        """Return the head of ``model``, which is the one that was measured or a copy of it."""
        found = copy.copy(self)
        found._model = model
        return found

    def __call__(
        self, hidden_BLH: Tensor, labels_BL: Tensor, *, with_entropy: bool, row_stats: Sequence[str] = ()
    ) -> Logprobs:
        """Return log-probabilities, and what else is asked for, [B, L] float32; 0 where the label is ``IGNORED``.

        Args:
            hidden_BLH: [B, L, H], the last hidden states.
            labels_BL: [B, L] int64, the token that follows each position.
            row_stats: those of ``linear_logprob``.
        """
        weight_VH, bias_V = self._weights()
        dtype = self._dtype(hidden_BLH)
        is_scored_BL = labels_BL != IGNORED
        with torch.autocast(hidden_BLH.device.type, enabled=False):  # the dtype is chosen
            found = linear_logprob(
                hidden_BLH[is_scored_BL].to(dtype),
                weight_VH.to(dtype),
                labels_BL[is_scored_BL],
                bias=bias_V,
                temperature=self._temperature,
                with_entropy=with_entropy,
                row_stats=row_stats,
                **self._form._asdict(),
            )
        entropy_BL = None if found.entropy is None else _spread(found.entropy, is_scored_BL)
        scores = Logprobs(_spread(found.logprob, is_scored_BL), entropy_BL)
        return scores.with_row_stats({name: _spread(x_T, is_scored_BL) for name, x_T in found.row_stats.items()})

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        model: Any = self._model
        head = model.get_output_embeddings()
        if hasattr(head, "base_layer"):
            raise UnsupportedError(
                "an adapter on the output head",
                "its product is not in the head's weight; take it out of target_modules",
            )
        return _whole(head.weight), None if head.bias is None else _whole(head.bias)

    def _dtype(self, hidden: Tensor) -> torch.dtype:
        if self._in_float32:
            return torch.float32
        kind = hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def replace_forward(model: Any, forward: Callable[..., Any]) -> None:
    """Let ``model(...)`` return ``forward(model, original, ...)``, where ``original`` is what it was before.

    It is a method, so that a deep copy of the model, such as an average of its weights, computes with its own.
    """
    before = model.forward
    function = before.__func__ if isinstance(before, MethodType) else None

    @functools.wraps(type(model).forward)  # Trainer and generate() read its arguments
    def replaced(self: Any, *args: Any, **options: Any) -> Any:
        return forward(self, before if function is None else MethodType(function, self), *args, **options)

    model.forward = MethodType(replaced, model)


def without_adapters(model: Any) -> Any:
    """Return the causal language model that PEFT wraps, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _spread(values_T: Tensor, is_scored_BL: Tensor) -> Tensor:
    """Return [B, L], connected to the model also where no label counts."""
    return values_T.new_zeros(is_scored_BL.shape).masked_scatter(is_scored_BL, values_T)
