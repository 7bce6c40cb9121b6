"""A batch: ``dict[str, Tensor]``, made from inference outputs and brought to one packed form for training.

    padded   input_ids [N, L] with attention_mask [N, L]
    packed   input_ids [T] with cu_seqlens [N+1]; an attention_mask beside it is 1 everywhere

``routed_experts``, of a mixture of experts, has [N, L, layers, experts a token] or [T, layers, experts a token]. Every
other tensor is per token ([N, L] or [T]), per sequence ([N]) or a scalar. Position t of log-probs, masks and advantages
belongs to token t given the tokens before it. ``loss_mask`` is 1 for the tokens that are trained on.

What the model reads beside the tokens, such as the pixels of images, is a ``SequenceInput``: rows of each sequence.

Letters: N sequences, L longest sequence, T tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.arguments import LIST, takes
from rlcore.engines.rank_batch import repeat
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.errors import InvalidInputError
from rlcore.kernels.packing import pack
from rlcore.routing.replay import joined_routes
from rlcore.routing.routers import ROUTES
from rlcore.sequence_input import SequenceInput, joined_inputs

Batch = Mapping[str, Tensor | SequenceInput]

LAYOUT = ("input_ids", "attention_mask", "cu_seqlens", "loss_mask", ROUTES)
"""The entries that scoring takes: the tokens, and which of them count."""


@takes("collate()", outputs=LIST)
def collate(outputs: Sequence[RequestOutput], **per_sequence: Any) -> dict[str, Any]:
    """Return one padded batch of every completion of ``outputs``, in order.

    Args:
        per_sequence: one value a completion, as a tensor or nested list of N numbers in any shape, such as
            ``advantages`` of shape [prompts, samples].

    Returns:
        ``input_ids`` [N, L] int64 (prompt and completion, right-padded), ``attention_mask`` and ``loss_mask`` [N, L]
        bool (True on completion tokens), ``old_logprobs`` [N, L] float32 (the sampler's; 0 elsewhere), each of
        ``per_sequence`` as [N], and what the prompts had beside their tokens, each as a ``SequenceInput``. If
        completions have them, also ``routed_experts`` [N, L, layers, experts a token] int16, -1 where none are known.

    Raises:
        InvalidInputError: no completion, another number of values than completions, or a NaN or infinity for one that
            has tokens.
    """
    if wrong := [output for output in outputs if not hasattr(output, "prompt_token_ids")]:
        raise InvalidInputError(f"collate() takes what generate() returned, got a list that has {wrong[0]!r:.200}")
    sequences = [(output.prompt_token_ids, completion) for output in outputs for completion in output.outputs]
    if not sequences:
        raise InvalidInputError("collate() needs at least one completion, got none")
    lengths = [len(prompt) + len(completion.token_ids) for prompt, completion in sequences]
    shape = len(sequences), max(lengths)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
        "old_logprobs": torch.zeros(shape),
    }
    for row, (prompt, completion) in enumerate(sequences):
        start, stop = len(prompt), lengths[row]
        batch["input_ids"][row, :stop] = torch.tensor([*prompt, *completion.token_ids])
        batch["attention_mask"][row, :stop] = True
        batch["loss_mask"][row, start:stop] = True
        batch["old_logprobs"][row, start:stop] = torch.tensor(completion.logprobs)
    routes = joined_routes([completion.routed_experts for _, completion in sequences], shape)
    batch |= {} if routes is None else {ROUTES: routes}
    is_trained_N = batch["loss_mask"].any(1)
    each = {name: _one_each(name, value, is_trained_N) for name, value in per_sequence.items()}
    inputs = joined_inputs([output.inputs for output in outputs for _ in output.outputs])
    return batch | inputs | each


def _one_each(name: str, value: object, is_trained_N: Tensor) -> Tensor:
    flat = on_host(name, value).flatten()
    if len(flat) != len(is_trained_N):
        raise InvalidInputError(f"collate() got {len(flat)} {name} for {len(is_trained_N)} completions; give one each")
    if flat.is_floating_point() and (bad_N := ~flat.isfinite() & is_trained_N).any():
        first = int(bad_N.nonzero()[0])
        raise InvalidInputError(
            f"collate() got {flat[first]:g} among {name}, for completion {first}; give finite numbers, or leave the "
            "completion out"
        )
    return flat


def separated(batch: Batch) -> tuple[dict[str, Tensor], dict[str, SequenceInput]]:
    """Return the tensors of a batch, and its inputs beside the tokens, which must be of as many sequences."""
    inputs = {name: value for name, value in batch.items() if isinstance(value, SequenceInput)}
    tensors: Any = {name: value for name, value in batch.items() if name not in inputs}
    if inputs and "input_ids" in tensors:
        edges = tensors.get("cu_seqlens")
        num_sequences = len(tensors["input_ids"]) if edges is None else len(edges) - 1
        for name, value in inputs.items():
            if len(value) != num_sequences:
                raise InvalidInputError(
                    f"{name} of the batch is of {len(value)} sequences, and the batch has {num_sequences}"
                )
    return tensors, inputs


def to_packed(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``batch`` on the host, packed, with every other entry expanded to one value a token [T].

    Raises:
        InvalidInputError: an entry is missing or has a shape that is none of the accepted ones, or an
            ``attention_mask`` beside ``cu_seqlens`` is not 1 everywhere.
    """
    host = {name: on_host(name, value) for name, value in batch.items()}
    if "input_ids" not in host:
        raise InvalidInputError(f"a batch needs input_ids; it has {sorted(host)}")
    if host["input_ids"].ndim != (1 if "cu_seqlens" in host else 2):
        raise InvalidInputError(
            "input_ids must be [N, L] with attention_mask, or [T] with cu_seqlens; "
            f"got {list(host['input_ids'].shape)} with {sorted(host)}"
        )
    if "cu_seqlens" not in host:
        host = _pack(host)
    keep = {"input_ids": host.pop("input_ids"), "cu_seqlens": host.pop("cu_seqlens")}
    _check_layout(**keep)
    lengths_N = keep["cu_seqlens"].diff().long()
    keep = {"input_ids": keep["input_ids"].long(), "cu_seqlens": keep["cu_seqlens"].to(torch.int32)}
    packed = keep | {name: _per_token(name, value, lengths_N) for name, value in host.items()}
    if "attention_mask" in packed:
        _check_all_attended(packed["attention_mask"])
    return packed


def on_host(name: str, value: Any) -> Tensor:
    """Return an entry of a batch as a tensor on the host, without gradient.

    Raises:
        InvalidInputError: it is none, and holds no numbers.
    """
    try:
        return torch.as_tensor(value).detach().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"batch entry {name!r} must be a tensor or numbers, got {value!r}") from error


def _pack(host: dict[str, Tensor]) -> dict[str, Tensor]:
    shape = list(host["input_ids"].shape)
    mask_NL = host.setdefault("attention_mask", torch.ones(shape, dtype=torch.bool))
    if list(mask_NL.shape) != shape:
        raise InvalidInputError(f"attention_mask must have the shape of input_ids, {shape}, got {list(mask_NL.shape)}")
    packed = dict(pack(host))
    empty = (mask_NL == 0).all(1).nonzero().flatten().tolist()
    if empty:
        raise InvalidInputError(f"attention_mask has no token of sequence {empty[0]}; leave it out of the batch")
    return packed


def _check_all_attended(mask_T: Tensor) -> None:
    """Refuse a mask of packed tokens that leaves one out: a token of a sequence is seen by those after it."""
    if (others_T := mask_T != 1).any():
        where = int(others_T.nonzero()[0])
        raise InvalidInputError(
            f"attention_mask is {mask_T[where].item()} for token {where} of a packed batch, all of whose tokens are of "
            "its sequences; leave it out of input_ids and cu_seqlens, or, to score it without training on it, set "
            "loss_mask to 0 there"
        )


def _check_layout(input_ids: Tensor, cu_seqlens: Tensor) -> None:
    for name, value in {"input_ids": input_ids, "cu_seqlens": cu_seqlens}.items():
        if value.is_floating_point() or value.is_complex():
            raise InvalidInputError(f"{name} must be whole numbers, got {value.dtype}")
    edges, num_tokens = cu_seqlens.tolist() if cu_seqlens.ndim == 1 else [], len(input_ids)
    if edges[:1] != [0] or edges[-1] != num_tokens or bool((cu_seqlens.diff() < 1).any()):
        raise InvalidInputError(
            f"cu_seqlens must rise from 0 to the {num_tokens} tokens of input_ids, got {cu_seqlens.tolist()}"
        )
    if num_tokens == 0:
        raise InvalidInputError("a batch needs at least one sequence, got none")


def _per_token(name: str, value: Tensor, lengths_N: Tensor) -> Tensor:
    num_sequences, num_tokens = len(lengths_N), int(lengths_N.sum())
    if name == ROUTES:
        if value.ndim != 3 or len(value) != num_tokens or value.is_floating_point():
            raise InvalidInputError(
                f"{ROUTES} must be whole numbers of shape [{num_tokens} tokens, layers, experts a token], got "
                f"{value.dtype} {list(value.shape)} of packed tokens"
            )
        return value.to(torch.int16)
    if value.shape == (num_tokens,):
        return value
    if value.shape == (num_sequences,):
        return value.index_select(0, repeat(torch.arange(num_sequences), lengths_N))
    if value.ndim == 0:
        return value.expand(num_tokens)
    raise InvalidInputError(
        f"batch entry {name!r} has shape {list(value.shape)}; accepted: one value a token, "
        f"one a sequence [{num_sequences}], or a scalar; what the model reads beside tokens is a rlcore.SequenceInput"
    )


def check_values(packed: Mapping[str, Tensor], vocab_size: int, counted_T: Tensor) -> None:
    """Raise InvalidInputError for a token id outside the vocabulary, or a NaN or infinity on a counted token."""
    ids_T = packed["input_ids"]
    if (bad_T := (ids_T < 0) | (ids_T >= vocab_size)).any():
        where = int(bad_T.nonzero()[0])
        raise InvalidInputError(
            f"input_ids of sequence {_sequence_of(packed, where)} holds {int(ids_T[where])}; "
            f"the model's vocabulary is 0 to {vocab_size - 1}"
        )
    for name, value_T in packed.items():
        if value_T.is_floating_point() and (bad_T := ~value_T.isfinite() & counted_T).any():
            where = int(bad_T.nonzero()[0])
            raise InvalidInputError(
                f"{name} of sequence {_sequence_of(packed, where)} is {float(value_T[where])} on a token that is "
                "trained on; mask the token in loss_mask or mend the value"
            )


def _sequence_of(packed: Mapping[str, Tensor], token: int) -> int:
    return int(torch.searchsorted(packed["cu_seqlens"].long(), token, right=True)) - 1


def loss_mask_of(packed: Mapping[str, Tensor]) -> Tensor:
    """Return [T] bool: tokens that count. A sequence's first never does, as no token precedes it."""
    given_T = packed.get("loss_mask", torch.ones_like(packed["input_ids"]))
    others = given_T[(given_T != 0) & (given_T != 1)]
    if len(others):
        raise InvalidInputError(
            f"loss_mask must be 0 or 1, or False or True, for each token, got {others[0].item()}; to weight tokens, "
            "multiply in loss_fn by an entry of another name"
        )
    mask_T = given_T.bool().clone()
    mask_T[packed["cu_seqlens"][:-1].long()] = False
    return mask_T


def padded(value_T: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return packed values in the shape of ``input_ids`` of the padded batch on the host, 0 on padding."""
    mask_NL = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    padded_NL: Tensor = torch.zeros(mask_NL.shape)
    padded_NL[mask_NL] = value_T
    return padded_NL
