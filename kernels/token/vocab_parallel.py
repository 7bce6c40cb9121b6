"""``token_logprob`` where each rank has some columns of the logits: see ``vocab_shard``.

One all-gather of the statistics in the forward; the backward needs nothing from other ranks.

Letters: T rows, V vocabulary of this rank, S statistics.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from rlcore.kernels.autograd.compiled import graph_break
from rlcore.kernels.autograd.forward_backward import ForwardBackward, LogprobOutput
from rlcore.kernels.dispatch import choose
from rlcore.kernels.operands import unlowered
from rlcore.kernels.softmax_rows import Logprobs, wide_dtype
from rlcore.kernels.token.logprob import recomputing_backward, shaped_like, wide_chunks
from rlcore.kernels.token.problem import LogitsProblem, logits_problem
from rlcore.kernels.vocab_shard import num_statistics, partial_statistics_


@graph_break("token_logprob with group= exchanges statistics with other ranks")
def scores_over_ranks(
    logits: Tensor, targets: Tensor, group: ProcessGroup, implementation: str | None, **options: Any
) -> Logprobs:
    """Compute ``token_logprob`` with ``group``; all ranks call it together."""
    joined, problem = logits_problem(logits, targets, **options)
    problem = problem.over(group, joined)
    run = choose("token_logprob", problem.query(logits), implementation).fn
    with unlowered(logits.device.type):
        return shaped_like(targets, run(joined, problem), problem.row_stats)


def _forward(logits: Tensor, problem: LogitsProblem, *, for_backward: bool) -> LogprobOutput:
    """Score with one all-gather, of S float32 statistics a row."""
    assert problem.shard is not None
    shape = logits.shape[:-1]
    asked: Any = {"with_entropy": problem.with_entropy, "row_stats": problem.row_stats}
    parts = logits.new_empty((*shape, num_statistics(**asked)), dtype=wide_dtype(logits.dtype))
    for index, chunk_TV, rows in wide_chunks(logits, problem):
        parts[index] = partial_statistics_(chunk_TV, rows, **asked)
    rows = problem.rows.reshaped((-1,))
    found = problem.shard.merged(parts.flatten(0, -2), rows, row_stats=problem.row_stats)
    entropy = rows.zero_ignored(found.entropy)
    return LogprobOutput(
        rows.zero_ignored(found.logprob).view(shape),
        None if entropy is None else entropy.view(shape),
        (found.peak.view(shape), found.total.view(shape)),
        row_stats={name: x.masked_fill(rows.ignored, 0).view(shape) for name, x in found.row_stats.items()},
    )


token_logprob_vocab_parallel = ForwardBackward(_forward, recomputing_backward, num_residuals=2)
"""Plain torch in chunks of rows, on any device with collectives."""
