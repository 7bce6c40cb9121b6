"""Cut a packed batch into shares of workers, and those into micro-batches of about equal tokens, shifted for scoring.

The hidden state of token t scores token t+1 of the same sequence. This is the only place that shifts: everything
above speaks of "the log-prob of token t", every operator below of "row r scores targets[r]". Only rows that count
reach the output head: prompts cost no vocabulary-sized work.

Letters: T tokens, N sequences, R scored rows.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.packing import balance

NOT_PER_TOKEN = ("input_ids", "cu_seqlens")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a packed batch, on the device.

    Boundaries stay on the host, where they are read to cut by them: on the device each reading would wait for it.
    """

    tokens: dict[str, Tensor]
    """``input_ids`` [T], and ``cu_seqlens`` [N+1] on the host: what ``module.hidden_states`` takes."""
    rows_R: Tensor
    """Hidden states that score: row r of the head is hidden[rows_R[r]]."""
    targets_R: Tensor
    """The token that each row scores."""
    per_token: dict[str, Tensor]
    """Every other entry of the batch, [R], aligned with ``targets_R``."""
    cu_rows: Tensor
    """Host tensor [N+1] int32: where each sequence's rows start."""
    positions_R: Tensor
    """Host tensor: the position in the packed share of the token that each row scores."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a packed batch that one worker works on."""

    packed: dict[str, Tensor]
    """Whole sequences, in the batch's order; perhaps none."""
    positions_T: Tensor
    """Where its tokens stand in the whole batch."""
    num_tokens: int
    """Of the whole batch."""
    num_micro_batches: int
    """The same for all workers: those whose sequences need fewer add empty ones, for the collectives to match."""


def shares(packed: Mapping[str, Tensor], num_workers: int, max_tokens: int) -> list[Share]:
    """Split a packed batch by tokens.

    Raises:
        InvalidInputError: a sequence is longer than ``max_tokens``.
    """
    cu_seqlens = packed["cu_seqlens"].long()
    lengths_N = cu_seqlens.diff()
    if len(lengths_N) and int(lengths_N.max()) > max_tokens:
        raise InvalidInputError(
            f"a sequence has {int(lengths_N.max())} tokens; max_tokens_per_micro_batch is {max_tokens}: raise it"
        )
    parts = [torch.tensor(part, dtype=torch.int64) for part in balance(lengths_N.tolist(), num_bins=num_workers)]
    count = max(len(balance(lengths_N[part].tolist(), max_tokens=max_tokens)) for part in parts)
    return [_share(packed, _tokens_of(cu_seqlens, part), lengths_N[part], count) for part in parts]


def _share(packed: Mapping[str, Tensor], token_T: Tensor, lengths_N: Tensor, count: int) -> Share:
    own = {name: _at(value_T, token_T) for name, value_T in packed.items() if name != "cu_seqlens"}
    num_tokens = len(packed["input_ids"])
    return Share(own | {"cu_seqlens": _offsets(lengths_N).to(torch.int32)}, token_T, num_tokens, count)


def micro_batches(share: Share, scored_T: Tensor, max_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """Sequences balanced by length, at most ``max_tokens`` tokens each; ``scored_T`` marks tokens that count."""
    packed = share.packed
    cu_seqlens = packed["cu_seqlens"].long()
    scored_T = scored_T.clone()
    scored_T[cu_seqlens[:-1]] = False  # nothing precedes the first token of a sequence
    selections = _evenly(cu_seqlens.diff().tolist(), share.num_micro_batches, max_tokens)
    for sequences in selections:
        yield _select(packed, scored_T, cu_seqlens, torch.tensor(sequences), device)
    for _ in range(share.num_micro_batches - len(selections)):
        yield _empty(packed, device)


def _evenly(lengths: list[int], count: int, max_tokens: int) -> list[list[int]]:
    """At most ``count`` micro-batches of about equal tokens, the fullest first: all workers gather the weights of each
    at once, and one of few tokens keeps the host as busy as any, and the device idle.

    ``balance(num_bins=)`` comes closer, in more time: 0.06 s for 4,096 sequences in 64.
    """
    bins: list[tuple[int, int, list[int]]] = [(0, place, []) for place in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        tokens, place, sequences = bins[0]
        sequences.append(index)
        heapq.heapreplace(bins, (tokens + lengths[index], place, sequences))
    if max(tokens for tokens, *_ in bins) > max_tokens:
        return balance(lengths, max_tokens=max_tokens)  # there is hardly room to choose
    return [sorted(sequences) for _, _, sequences in sorted(bins, reverse=True) if sequences]


def _empty(packed: Mapping[str, Tensor], device: torch.device) -> MicroBatch:
    """A sequence that scores nothing. Of two tokens: what is compiled for any length is compiled again for one."""
    zeros = {name: value_T.new_zeros(2) for name, value_T in packed.items() if name != "cu_seqlens"}
    alone = zeros | {"cu_seqlens": torch.tensor([0, 2])}
    unscored_T = torch.zeros(2, dtype=torch.bool)
    return _select(alone, unscored_T, alone["cu_seqlens"], torch.zeros(1, dtype=torch.int64), device)


def _select(
    packed: Mapping[str, Tensor],
    scored_T: Tensor,
    cu_seqlens: Tensor,
    sequences: Tensor,
    device: torch.device,
) -> MicroBatch:
    lengths_N = cu_seqlens.diff()[sequences]
    cu_local = _offsets(lengths_N)
    token_T = _tokens_of(cu_seqlens, sequences)
    target_R = _at(scored_T, token_T).nonzero().squeeze(1)
    sequence_T = _repeat(torch.arange(len(sequences)), lengths_N)
    rows_N = torch.bincount(_at(sequence_T, target_R), minlength=len(sequences))
    positions_R = _at(token_T, target_R)
    names = [name for name in packed if name not in NOT_PER_TOKEN]
    per_token = [_at(packed[name], positions_R) for name in names]
    ids_T = packed["input_ids"]
    input_ids, rows_R, targets_R, *per_token = on_device(
        [_at(ids_T, token_T), target_R - 1, _at(ids_T, positions_R), *per_token], device
    )

    return MicroBatch(
        tokens={"input_ids": input_ids, "cu_seqlens": cu_local.to(torch.int32)},
        rows_R=rows_R,
        targets_R=targets_R,
        per_token=dict(zip(names, per_token, strict=True)),
        cu_rows=_offsets(rows_N).to(torch.int32),
        positions_R=positions_R,
    )


def on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Parts of one copy, which costs the host what each of them would, and for which nobody waits: out of pageable
    memory it would begin when the device has done all its work."""
    accelerator = torch.accelerator.current_accelerator()
    is_pinned = accelerator is not None and accelerator.type == device.type
    starts = list(itertools.accumulate((-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors), initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_pinned)
    for tensor, part in zip(tensors, _parts(buffer, starts, tensors), strict=True):
        part.copy_(tensor)
    return _parts(buffer.to(device, non_blocking=True), starts, tensors)


_ALIGNMENT = 64
"""Bytes: of what kernels read, the start is a multiple of 16, as of tensors of their own."""


def _parts(buffer: Tensor, starts: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    parts = zip(starts, like, strict=False)  # the last start is the end
    return [buffer[start : start + x.nbytes].view(x.dtype).view(x.shape) for start, x in parts]


def _tokens_of(cu_seqlens: Tensor, sequences: Tensor) -> Tensor:
    """Position in the batch of every token of these sequences."""
    lengths_N = cu_seqlens.diff()[sequences]
    cu_local = _offsets(lengths_N)
    shift_N = cu_seqlens[:-1][sequences] - cu_local[:-1]
    return torch.arange(int(cu_local[-1])) + _repeat(shift_N, lengths_N)


def _at(value_T: Tensor, index_R: Tensor) -> Tensor:
    """``value_T[index_R]`` by this thread alone, as ``_repeat`` is. Indexing and repeat_interleave wake every thread of
    OpenMP for a few thousand tokens: on a busy host of 64 processors that took 10 ms a time, the work itself 10 us."""
    return value_T.index_select(0, index_R)


def _repeat(value_N: Tensor, times_N: Tensor) -> Tensor:
    return torch.from_numpy(np.repeat(value_N.numpy(), times_N.numpy()))


def _offsets(lengths_N: Tensor) -> Tensor:
    return torch.cat([lengths_N.new_zeros(1), lengths_N.cumsum(0)])


def check_tokens(packed: Mapping[str, Tensor], vocab_size: int) -> None:
    """Raise InvalidInputError for token ids outside the vocabulary, naming the sequence."""
    bad_T = (packed["input_ids"] < 0) | (packed["input_ids"] >= vocab_size)
    if bad_T.any():
        where = int(bad_T.nonzero()[0])
        raise InvalidInputError(
            f"input_ids of sequence {_sequence_of(packed, where)} holds {int(packed['input_ids'][where])}; "
            f"the model's vocabulary is 0 to {vocab_size - 1}"
        )


def check_finite(packed: Mapping[str, Tensor], scored_T: Tensor) -> None:
    """Raise InvalidInputError for a NaN or infinity where it would count, naming entry and sequence."""
    for name, value_T in packed.items():
        if not value_T.is_floating_point():
            continue
        bad_T = ~value_T.isfinite() & scored_T
        if bad_T.any():
            where = int(bad_T.nonzero()[0])
            raise InvalidInputError(
                f"{name} of sequence {_sequence_of(packed, where)} is {float(value_T[where])} on a token that is "
                "trained on; mask the token in loss_mask or mend the value"
            )


def _sequence_of(packed: Mapping[str, Tensor], token: int) -> int:
    return int(torch.searchsorted(packed["cu_seqlens"].long(), token, right=True)) - 1
