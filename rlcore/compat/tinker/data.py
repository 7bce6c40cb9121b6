"""Tinker's data as packed batches.

Letters: T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.arguments import LIST
from rlcore.compat.tinker import types
from rlcore.errors import InvalidInputError

_MAX_TOKENS = 16384
"""Tokens of a micro-batch."""
_NO_TARGET = -100
"""As in PyTorch's losses: the log-prob of such a target is 0."""


def check_data(data: Sequence[types.Datum], reads: Sequence[str], *, caller: str, vocab_size: int) -> None:
    """Refuse data before anything is computed: the gradients of a micro-batch could not be taken back.

    Args:
        reads: the inputs that the loss reads, besides the target tokens.
        caller: the method that was given the data, for messages.
    """
    if not LIST.has(data) or not all(isinstance(datum, types.Datum) for datum in data):
        raise InvalidInputError(f"{caller} takes a list of Datum as data, got {data!r:.100}")
    if not data:
        raise InvalidInputError(f"{caller} needs at least one datum, got none")
    for number, datum in enumerate(data):
        where = f"{caller}: datum {number}"
        _check_lengths(datum, reads, where)
        _check_values(datum, reads, where, vocab_size)


def refuse_unread(data: Sequence[types.Datum], reads: Sequence[str], *, caller: str) -> None:
    """Refuse inputs of a datum that the loss does not read: without a word it would be another loss than was meant."""
    accepted = ("target_tokens", *reads)
    for number, datum in enumerate(data):
        if unread := sorted(datum.loss_fn_inputs.keys() - accepted):
            raise InvalidInputError(
                f"{caller}: datum {number} has loss_fn_inputs[{unread[0]!r}], which the loss does not read; "
                f"accepted: {', '.join(accepted)}"
            )


def _check_lengths(datum: types.Datum, reads: Sequence[str], where: str) -> None:
    length = datum.model_input.length
    if not length:
        raise InvalidInputError(f"{where} has an empty model_input; give at least one token")
    for name in ("target_tokens", *reads):
        found = datum.loss_fn_inputs.get(name)
        if found is None:
            raise InvalidInputError(f"{where} has no loss_fn_inputs[{name!r}], which the loss reads")
        if len(found.data) != length:
            raise InvalidInputError(f"{where} has {len(found.data)} {name} for {length} tokens of model_input")


def _check_values(datum: types.Datum, reads: Sequence[str], where: str, vocab_size: int) -> None:
    if (given := datum.loss_fn_inputs["target_tokens"]).dtype != "int64":
        raise InvalidInputError(f"{where} has target_tokens of {given.dtype}; give token ids, whole numbers")
    targets = [one for one in datum.loss_fn_inputs["target_tokens"].data if one != _NO_TARGET]
    for name, ids in (("model_input", datum.model_input.to_ints()), ("target_tokens", targets)):
        if bad := [one for one in ids if not 0 <= one < vocab_size]:
            raise InvalidInputError(
                f"{where} has {bad[0]} in {name}; the model's token ids are 0 to {vocab_size - 1}, and "
                f"{_NO_TARGET} in target_tokens is no target"
            )
    for name in reads:
        for token, value in enumerate(datum.loss_fn_inputs[name].to_torch().flatten().tolist()):
            if not math.isfinite(value):
                raise InvalidInputError(
                    f"{where} has {value} as {name} of token {token}; give finite numbers, 0 where none is meant"
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
