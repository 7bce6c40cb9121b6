"""A batch: ``dict[str, Tensor]``, made from inference outputs and brought to one packed form for training.

    padded   input_ids [N, L] with attention_mask [N, L]
    packed   input_ids [T] with cu_seqlens [N+1]

Every other entry is per token ([N, L] or [T]), per sequence ([N]) or a scalar. Position t of log-probs, masks and
advantages belongs to token t given the tokens before it. ``loss_mask`` marks the tokens that are trained on.

Letters: N sequences, L longest sequence, T tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.completion import RequestOutput
from rlcore.errors import InvalidInputError
from rlcore.kernels.packing import pack


def collate(outputs: Sequence[RequestOutput], **per_sequence: Any) -> dict[str, Tensor]:
    """One padded batch of every completion of ``outputs``, in order.

    Args:
        per_sequence: one value a completion, as a tensor or nested list of N numbers in any shape, such as
            ``advantages`` of shape [prompts, samples].

    Returns:
        ``input_ids`` [N, L] int64 (prompt and completion, right-padded), ``attention_mask`` and ``loss_mask`` [N, L]
        bool (True on completion tokens), ``old_logprobs`` [N, L] float32 (the sampler's; 0 elsewhere), and each of
        ``per_sequence`` as [N].

    Raises:
        InvalidInputError: no completion, or another number of values than completions.
    """
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
    return batch | {name: _one_each(name, value, len(sequences)) for name, value in per_sequence.items()}


def _one_each(name: str, value: Any, num_sequences: int) -> Tensor:
    flat = torch.as_tensor(value).flatten()
    if len(flat) != num_sequences:
        raise InvalidInputError(f"collate() got {len(flat)} {name} for {num_sequences} completions; give one each")
    return flat


def to_packed(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``batch`` on the host, packed, with every other entry spread to one value a token [T].

    Raises:
        InvalidInputError: an entry is missing or has a shape that is none of the accepted ones.
    """
    host = {name: torch.as_tensor(value).detach().cpu() for name, value in batch.items()}
    if "input_ids" not in host:
        raise InvalidInputError(f"a batch needs input_ids; it has {sorted(host)}")
    if "cu_seqlens" not in host:
        host = _pack(host)
    lengths_N = host["cu_seqlens"].diff().long()
    num_tokens = len(host["input_ids"])
    if int(lengths_N.sum()) != num_tokens or bool((lengths_N < 1).any()):
        raise InvalidInputError(
            f"cu_seqlens must rise from 0 to the {num_tokens} tokens of input_ids, got {host['cu_seqlens'].tolist()}"
        )
    keep = {"input_ids": host.pop("input_ids").long(), "cu_seqlens": host.pop("cu_seqlens").to(torch.int32)}
    return keep | {name: _per_token(name, value, lengths_N) for name, value in host.items()}


def _pack(host: dict[str, Tensor]) -> dict[str, Tensor]:
    input_ids_NL = host["input_ids"]
    if input_ids_NL.ndim != 2:
        raise InvalidInputError(
            "input_ids must be [N, L] with attention_mask, or [T] with cu_seqlens; "
            f"got {list(input_ids_NL.shape)} with {sorted(host)}"
        )
    host.setdefault("attention_mask", torch.ones_like(input_ids_NL, dtype=torch.bool))
    return dict(pack(host))


def _per_token(name: str, value: Tensor, lengths_N: Tensor) -> Tensor:
    num_sequences, num_tokens = len(lengths_N), int(lengths_N.sum())
    if value.shape == (num_tokens,):
        return value
    if value.shape == (num_sequences,):
        return value.repeat_interleave(lengths_N)
    if value.ndim == 0:
        return value.expand(num_tokens)
    raise InvalidInputError(
        f"batch entry {name!r} has shape {list(value.shape)}; accepted: one value a token, "
        f"one a sequence [{num_sequences}], or a scalar"
    )
