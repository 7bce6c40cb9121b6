"""Inputs of sequences that are not their tokens, such as the pixels of images.

A batch holds such an input as rows of a tensor, of which each sequence has a run: one row an image, a patch or whatever
the model counts. Sequences may have the same rows, as the completions of one prompt do, and none.

Letters: N sequences, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class SequenceInput:
    """One input of N sequences. An index, a slice or a mask chooses some of them, as of a tensor [N]."""

    rows: Tensor
    """[R, ...] in host memory."""
    starts_N: Tensor
    """Host tensor int64: the first row of each sequence."""
    counts_N: Tensor
    """Host tensor int64: the number of its rows."""

    @classmethod
    def of(cls, parts: Sequence[Tensor | None]) -> SequenceInput:
        """Return the input of sequences of which each has these rows; a tensor that is given again is kept once.

        Args:
            parts: [rows, ...] of each sequence, of equal dtype and further dimensions; None for a sequence without.

        Raises:
            InvalidInputError: no part has rows, or two of them do not fit together.
        """
        different = {id(part): part for part in parts if part is not None}
        if not different:
            raise InvalidInputError("SequenceInput.of() needs the rows of one sequence at least; got none")
        tensors = [_rows_of(part) for part in different.values()]
        kinds = {(part.dtype, part.shape[1:]) for part in tensors}
        if len(kinds) > 1:
            found = " and ".join(f"{dtype} [rows, {', '.join(map(str, shape))}]" for dtype, shape in kinds)
            raise InvalidInputError(f"SequenceInput.of() joins rows of one dtype and shape; got {found}")
        ends = torch.tensor([len(part) for part in tensors]).cumsum(0).tolist()
        runs = {key: (end - len(part), len(part)) for key, end, part in zip(different, ends, tensors, strict=True)}
        each = [(0, 0) if part is None else runs[id(part)] for part in parts]
        starts_N, counts_N = torch.tensor(each, dtype=torch.int64).unbind(1)
        return cls(torch.cat(tensors), starts_N, counts_N)

    def __len__(self) -> int:
        return len(self.starts_N)

    def __getitem__(self, sequences: Any) -> SequenceInput:
        return SequenceInput(self.rows, self.starts_N[sequences], self.counts_N[sequences])

    def part(self, sequence: int) -> Tensor:
        """Return the rows of one sequence."""
        start = int(self.starts_N[sequence])
        return self.rows[start : start + int(self.counts_N[sequence])]

    def compact(self) -> SequenceInput:
        """Return the same input with those rows alone that its sequences have, each run of them once."""
        runs, inverse_N = torch.unique(torch.stack([self.starts_N, self.counts_N], 1), dim=0, return_inverse=True)
        starts, counts = runs.unbind(1)
        own_starts = pad(counts.cumsum(0), (1, 0))
        rows = self.rows.index_select(0, _indices(starts, counts))
        return SequenceInput(rows, own_starts[:-1][inverse_N], self.counts_N)

    def joined(self) -> Tensor:
        """Return the rows of all sequences, one after the other."""
        return self.rows.index_select(0, _indices(self.starts_N, self.counts_N))


def joined_inputs(each: Sequence[Mapping[str, Tensor]]) -> dict[str, SequenceInput]:
    """Return the inputs of a batch, of those that each of its sequences has by name."""
    names = {name: None for inputs in each for name in inputs}
    return {name: SequenceInput.of([inputs.get(name) for inputs in each]) for name in names}


def _rows_of(part: Any) -> Tensor:
    if not isinstance(part, Tensor) or part.ndim == 0:
        raise InvalidInputError(f"rows of a sequence must be a tensor [rows, ...], got {part!r:.200}")
    return part.detach().cpu()


def _indices(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of these runs, by NumPy: see ``rlcore.engines.rank_batch`` for why."""
    ends = counts.cumsum(0)
    shift = torch.from_numpy(np.repeat((starts - ends + counts).numpy(), counts.numpy()))
    return torch.arange(int(counts.sum())) + shift
