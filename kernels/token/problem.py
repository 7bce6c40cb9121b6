"""The checked arguments that an implementation of ``token_logprob`` takes besides the logits.

Letters: T rows, V vocabulary, N batch entries where the rows of the logits do not flatten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from rlcore.kernels.dispatch import Query
from rlcore.kernels.operands import (
    check_flag,
    check_ignore_index,
    check_token_dtype,
    check_token_range,
    checked_temperature,
)
from rlcore.kernels.row_stats import checked_row_stats
from rlcore.kernels.softmax_rows import ScaledRows, wide_dtype
from rlcore.kernels.vocab_shard import VocabularyShard
from rlcore.planned import planned_device, type_meant


@dataclass(frozen=True, slots=True)
class LogitsProblem:
    """All arguments but the logits. The public operator makes and checks it."""

    rows: ScaledRows
    """Shaped like the targets."""
    keep_mask: Tensor | None = None
    """Shaped like the logits."""
    with_entropy: bool = False
    inplace_backward: bool = False
    shard: VocabularyShard | None = None
    """Given where the logits are this rank's part of the vocabulary."""
    row_stats: tuple[str, ...] = ()

    def query(self, logits: Tensor) -> Query:
        """Return what the dispatcher decides on."""
        flags = {
            "entropy": self.with_entropy,
            "keep_mask": self.keep_mask is not None,
            "inplace_backward": self.inplace_backward,
            "group": self.shard is not None,
            "row_stats": bool(self.row_stats),
        }
        options = frozenset(name for name, is_used in flags.items() if is_used)
        device = logits.device
        return Query(type_meant(device), logits.dtype, 0, int(logits.shape[-1]), options, planned_device(device))

    def reshaped(self, shape: Sequence[int]) -> LogitsProblem:
        """Return the same problem with targets of this shape."""
        keep_mask = None if self.keep_mask is None else self.keep_mask.reshape(*shape, self.keep_mask.shape[-1])
        return replace(self, rows=self.rows.reshaped(shape), keep_mask=keep_mask)

    def over(self, group: ProcessGroup, logits: Tensor) -> LogitsProblem:
        """Return the same problem for logits that are this rank's part; all ranks call it together.

        Raises:
            InvalidInputError: targets are no tokens of all ranks together, or as ``VocabularyShard.of``.
        """
        rows, vocab_size = self.rows, logits.shape[-1]
        shard = VocabularyShard.of(
            group, vocab_size, rows.labels.numel(), logits.device, what="logits must be [..., T, V]"
        )
        check_token_range(rows.labels, shard.vocab_size, rows.ignore_index)
        return replace(self, rows=shard.rows(rows, vocab_size), shard=shard)


def logits_problem(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    with_entropy: bool,
    ignore_index: int,
    keep_mask: Tensor | None,
    inplace_backward: bool,
    row_stats: Sequence[str] = (),
) -> tuple[Tensor, LogitsProblem]:
    """Return the logits as [T, V] or [N, L, V], and the problem of scoring ``targets``.

    It does not check that the targets are tokens below V.

    Raises:
        InvalidInputError: a temperature, a flag, the dtype of the targets, the ``ignore_index``, or a name.
    """
    check_flag("with_entropy", with_entropy)
    check_flag("inplace_backward", inplace_backward)
    check_ignore_index(ignore_index)
    temperature = checked_temperature(temperature, targets, ignore_index, wide_dtype(logits.dtype))
    check_token_dtype(targets)
    problem = LogitsProblem(
        ScaledRows(targets, ignore_index, 1 / temperature),
        keep_mask,
        with_entropy,
        inplace_backward,
        row_stats=checked_row_stats(row_stats),
    )
    if logits.dim() > 2:
        logits = _joined(logits)
        problem = problem.reshaped(logits.shape[:-1])
    return logits, problem


def _joined(logits: Tensor) -> Tensor:
    """Return [T, V] where strides allow a view, else [N, L, V], as for logits[:, :-1]."""
    *leading, num_rows, vocab_size = logits.shape  # no -1 below, which a rank without columns leaves undefined
    count = math.prod(leading)
    try:
        return logits.view(count * num_rows, vocab_size)
    except RuntimeError:  # the only way in which torch says that the strides do not allow it
        return logits.reshape(count, num_rows, vocab_size)
