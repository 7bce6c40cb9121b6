"""Tinker's data as packed batches.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.arguments import LIST
from rlcore.compat.tinker import types
from rlcore.errors import InvalidInputError

_MAX_TOKENS = 16384
"""Tokens of a micro-batch."""


def check_data(data: Sequence[types.Datum], reads: Sequence[str]) -> None:
    if not LIST.has(data) or not all(isinstance(datum, types.Datum) for datum in data):
        raise InvalidInputError(f"forward_backward() takes a list of Datum as data, got {data!r:.100}")
    if not data:
        raise InvalidInputError("forward_backward() needs at least one datum, got none")
    for number, datum in enumerate(data):
        if not datum.model_input.length:
            raise InvalidInputError(f"the model_input of datum {number} is empty; give at least one token")
        for name in ("target_tokens", *reads):
            found = datum.loss_fn_inputs.get(name)
            if found is None:
                raise InvalidInputError(f"datum {number} has no loss_fn_inputs[{name!r}], which the loss reads")
            if len(found.data) != datum.model_input.length:
                raise InvalidInputError(
                    f"datum {number} has {len(found.data)} {name} for {datum.model_input.length} tokens of model_input"
                )


def micro_batches(data: Sequence[types.Datum]) -> list[list[types.Datum]]:
    parts: list[list[types.Datum]] = []
    room = 0
    for datum in data:
        if datum.model_input.length > room or not parts:
            parts.append([])
            room = _MAX_TOKENS
        parts[-1].append(datum)
        room -= datum.model_input.length
    return parts


def packed(data: Sequence[types.Datum], reads: Sequence[str]) -> dict[str, Tensor]:
    lengths = torch.tensor([0, *(datum.model_input.length for datum in data)])
    joined = {
        name: torch.cat([datum.loss_fn_inputs[name].to_torch().flatten() for datum in data])
        for name in ("target_tokens", *reads)
    }
    tokens = [token for datum in data for token in datum.model_input.to_ints()]
    return joined | {"input_ids": torch.tensor(tokens), "cu_seqlens": lengths.cumsum(0).to(torch.int32)}


def with_inputs(datum: types.Datum, **inputs: Tensor) -> types.Datum:
    return types.Datum(datum.model_input, {**datum.loss_fn_inputs, **inputs})
