"""Split a packed batch over the ranks of a train engine.

Tensors are cut by ``index_select`` and NumPy, which use this thread alone. Indexing and repeat_interleave wake every
thread of OpenMP for a few thousand tokens. On a busy host of 64 processors that took 10 ms a time, the work itself
10 us.

Letters: T tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore.errors import InvalidInputError
from rlcore.kernels.packing import balance
from rlcore.sequence_input import SequenceInput

WEIGHT = "token_weight"
"""Entry of a packed batch that is made from ``token_weights=``: the factor of each token in the loss of the batch."""
SCORED = "is_scored"
"""Entry of a packed batch: True for tokens whose log-probs are asked for."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The part of a packed batch that one rank works on."""

    packed: dict[str, Tensor]
    """Whole sequences, in the batch's order; perhaps none."""
    positions_T: Tensor
    """The position in the whole batch of each token."""
    num_tokens: int
    """Number of tokens in the whole batch."""
    num_micro_batches: int
    """The same on all ranks: a rank that needs fewer adds empty micro-batches, so that collectives match."""
    num_parts: int = 1
    """The parts into which the tokens of each micro-batch are cut (sequence parallelism)."""
    part: int = 0
    """The number of this rank's part."""
    inputs: Mapping[str, SequenceInput] = field(default_factory=dict)
    """Inputs of the sequences beside their tokens, such as images."""
    has_companion: bool = False
    """The last sequence is here for its ``inputs`` alone. Micro-batches that have none compute it, unscored: each rank
    then runs the same parts of the model, and all of them exchange the same weights and gradients."""


def rank_batches(
    packed: Mapping[str, Tensor],
    num_ranks: int,
    max_tokens: int,
    *,
    sequence_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    inputs: Mapping[str, SequenceInput] | None = None,
) -> list[RankBatch]:
    """Split a packed batch into parts of about equal tokens.

    Args:
        sequence_parallel_size: ranks that share one part, each computing some of its tokens.
        tensor_parallel_size: neighbouring ranks that compute the same tokens.
        max_tokens: the most tokens of a micro-batch.
        inputs: of the sequences, beside their tokens.

    Raises:
        InvalidInputError: a sequence is longer than ``max_tokens``.
    """
    cu_seqlens = packed["cu_seqlens"].long()
    lengths_N = cu_seqlens.diff()
    if len(lengths_N) and int(lengths_N.max()) > max_tokens:
        raise InvalidInputError(
            f"a sequence has {int(lengths_N.max())} tokens; max_tokens_per_micro_batch is {max_tokens}: raise it"
        )
    num_bins = num_ranks // sequence_parallel_size // tensor_parallel_size
    parts = [torch.tensor(part, dtype=torch.int64) for part in balance(lengths_N.tolist(), num_bins=num_bins)]
    count = max(len(balance(lengths_N[part].tolist(), max_tokens=max_tokens)) for part in parts)
    companion = _companion(lengths_N, inputs) if inputs and len(parts) > 1 else None
    batches = []
    for own_sequences in parts:
        sequences = own_sequences if companion is None else torch.cat([own_sequences, companion])
        cu_local, token_T = tokens_of(cu_seqlens, sequences)
        is_whole = len(parts) == 1  # micro-batches are copies, this need not be one
        own = {
            name: value_T if is_whole else value_T.index_select(0, token_T)
            for name, value_T in packed.items()
            if name != "cu_seqlens"
        }
        own["cu_seqlens"] = cu_local.to(torch.int32)
        shared = RankBatch(
            own,
            token_T,
            len(packed["input_ids"]),
            count,
            sequence_parallel_size,
            inputs={name: value[sequences].compact() for name, value in (inputs or {}).items()},
            has_companion=companion is not None,
        )
        for part in range(sequence_parallel_size):
            batches += [replace(shared, part=part)] * tensor_parallel_size
    return batches


def _companion(lengths_N: Tensor, inputs: Mapping[str, SequenceInput]) -> Tensor:
    """Return the number [1] of the shortest sequence that has rows of all inputs."""
    has_all_N = torch.stack([value.counts_N > 0 for value in inputs.values()]).all(0)
    return torch.where(has_all_N, lengths_N, torch.iinfo(torch.int64).max).argmin()[None]


def tokens_of(cu_seqlens: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each of these sequences starts once they are joined [N + 1], and where their tokens are now [T]."""
    lengths_N = cu_seqlens.diff()[sequences]
    cu_local = pad(lengths_N.cumsum(0), (1, 0))
    shift_N = cu_seqlens[:-1][sequences] - cu_local[:-1]
    return cu_local, torch.arange(int(cu_local[-1])) + repeat(shift_N, lengths_N)


def repeat(value_N: Tensor, times_N: Tensor) -> Tensor:
    """Return each value ``times_N`` times."""
    return torch.from_numpy(np.repeat(value_N.numpy(), times_N.numpy()))
