"""``linear_logprob`` and ``linear_loss`` where each rank has a part of the vocabulary: see ``vocab_shard``.

The gradient of the weight needs nothing from other ranks. That of the hidden states is the sum over them, in float32.
The sum of a chunk runs while the chunk's gradient of the weight is computed (``HeadGradients``).

Letters: T rows, H hidden size, V vocabulary of this rank, S statistics.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from rlcore.kernels.autograd.forward_backward import ForwardBackward, LogprobOutput
from rlcore.kernels.chunks import row_chunks
from rlcore.kernels.linear.head import LinearHead
from rlcore.kernels.linear.logprob import recomputing_backward
from rlcore.kernels.linear.loss import linear_loss_chunked
from rlcore.kernels.linear.problem import LinearHeadProblem
from rlcore.kernels.vocab_shard import num_statistics, partial_statistics_


def _forward(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem, *, for_backward: bool
) -> LogprobOutput:
    """Score with one all-gather, of [T, S] float32 statistics."""
    assert problem.shard is not None
    head = LinearHead(weight_VH, bias_V, problem.softcap)
    asked: Any = {"with_entropy": problem.with_entropy, "row_stats": problem.row_stats}
    parts_TS = hidden_TH.new_empty((len(hidden_TH), num_statistics(**asked)), dtype=head.wide)
    for chunk in row_chunks(len(hidden_TH), problem.chunk_rows(hidden_TH, weight_VH)):
        rows = problem.rows.at(chunk)
        logits_TV = head.logits(rows.zero_ignored_rows(hidden_TH[chunk]))
        parts_TS[chunk] = partial_statistics_(logits_TV, rows, **asked)
    found = problem.shard.merged(parts_TS, problem.rows, row_stats=problem.row_stats)
    return LogprobOutput(
        problem.rows.zero_ignored(found.logprob),
        problem.rows.zero_ignored(found.entropy),
        (found.peak, found.total),
        row_stats={name: x.masked_fill(problem.rows.ignored, 0) for name, x in found.row_stats.items()},
    )


linear_logprob_vocab_parallel = ForwardBackward(_forward, recomputing_backward, num_residuals=2)
"""Plain torch in chunks of rows, on any device with collectives."""


linear_loss_vocab_parallel = functools.partial(linear_loss_chunked, logprob=linear_logprob_vocab_parallel)
"""One all-gather a chunk, of [t, S] float32 statistics. Every rank runs the loss function on the same numbers."""
