"""A loss of log-probabilities whose gradients are formed in its forward pass, chunk by chunk.

An implementation of ``linear_loss`` is a ``ChunkWork``: what it does with a chunk of rows before and after the
loss function. The rest is here: the walk over chunks, the loss function and its two small gradients, the sums, and
the autograd function whose backward brings in the upstream scalar.

Letters: T rows.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.kernels.autograd.once import differentiable_once
from rlcore.kernels.chunks import row_chunks, sequence_chunks
from rlcore.kernels.linear.head import Needs, Totals
from rlcore.kernels.linear.problem import HeadInputs
from rlcore.kernels.losses.evaluate import (
    Statistics,
    TokenInputs,
    token_values,
    values_and_gradients,
    weighted_sum,
)
from rlcore.kernels.losses.interface import LossFn


class LossOutput(NamedTuple):
    loss: Tensor
    """Scalar, float32 (float64 for float64 inputs), differentiable in hidden, weight and bias."""
    stats: dict[str, Tensor]
    """Scalars on the device, without gradient: the loss function's statistics and ``entropy_mean``."""


class LossTask(NamedTuple):
    """What an implementation of ``linear_loss`` is given besides a head's inputs and task."""

    loss_fn: LossFn
    tokens: TokenInputs
    cu_seqlens: list[int] | None
    """Of a sequence-level loss: its chunks end where sequences end."""

    def exceeds(self, rows_per_chunk: int) -> bool:
        """Whether a sequence that must be taken whole does not fit into a chunk: see ``scored_loss``."""
        edges = self.cu_seqlens or []
        return any(end - start > rows_per_chunk for start, end in itertools.pairwise(edges))


class KnownGradients(NamedTuple):
    """Gradients of the inputs but for a factor."""

    saved: Sequence[Tensor | None]
    """What autograd keeps for them."""
    times: Callable[[Sequence[Tensor | None], Tensor], Sequence[Tensor | None]]
    """Of ``saved`` and the factor, a scalar on their device: each gradient in the dtype of its input, rounded once."""


class ChunkWork(ABC):
    dtype: torch.dtype
    """Of log-probabilities and loss."""

    @abstractmethod
    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies (None if not asked for), 0 in ignored rows."""

    @abstractmethod
    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        """Take in the gradients of what ``statistics`` last returned; those of ignored rows may be anything."""

    @abstractmethod
    def gradients(self, inputs: HeadInputs) -> KnownGradients:
        """Of all chunks; nothing is asked of this work after that."""


class SummingWork(ChunkWork):
    """One that adds up the gradients of its chunks."""

    @abstractmethod
    def totals(self) -> Totals:
        """Of all chunks so far."""

    def gradients(self, inputs: HeadInputs) -> KnownGradients:
        scaled, dtypes = self.scaled, [None if x is None else x.dtype for x in inputs]

        def times(totals: Sequence[Tensor | None], factor: Tensor) -> list[Tensor | None]:
            pairs = zip(totals, dtypes, strict=True)
            return [None if x is None or dtype is None else scaled(x, factor, dtype) for x, dtype in pairs]

        return KnownGradients(self.totals(), times)

    @staticmethod
    def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """``total`` times a scalar on its device, rounded once to ``dtype``."""
        return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))


def loss_in_chunks(work: ChunkWork, inputs: HeadInputs, loss: LossTask, rows_per_chunk: int) -> LossOutput:
    """The loss of ``inputs`` by ``work``, in chunks of rows or of whole sequences."""
    chunks: Iterable[tuple[slice, list[int] | None]]
    if loss.cu_seqlens is None:
        chunks = ((chunk, None) for chunk in row_chunks(len(inputs.hidden), rows_per_chunk))
    else:
        chunks = sequence_chunks(loss.cu_seqlens, rows_per_chunk)
    if not any(Needs.of(*inputs)):
        return _summed(work, loss, chunks, with_gradients=False)
    total, stats = _summed(work, loss, chunks, with_gradients=True)
    return LossOutput(_KnownGradients.apply(total, work, *inputs), stats)  # type: ignore[no-untyped-call]


def sequence_entries(cu_seqlens: list[int] | None, tokens: TokenInputs) -> dict[str, Tensor]:
    """What only a sequence-level loss is given."""
    if cu_seqlens is None:
        return {}
    # torch.tensor(device=...) would wait for the products of the chunk
    edges_N = torch.tensor(cu_seqlens).to(tokens.weight.device, non_blocking=True)
    return {"cu_seqlens": edges_N, "token_mask": tokens.is_counted.clone()}


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients are known already, but for a factor."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, work: ChunkWork, *inputs: Any) -> Tensor:
        known = work.gradients(HeadInputs(*inputs))
        ctx.save_for_backward(*known.saved)
        ctx.times = known.times
        return loss.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.times(ctx.saved_tensors, upstream))


@torch.no_grad()
def _summed(
    work: ChunkWork, loss: LossTask, chunks: Iterable[tuple[slice, list[int] | None]], *, with_gradients: bool
) -> LossOutput:
    values: list[Tensor] = []
    statistics = Statistics()
    for chunk, cu_seqlens in chunks:
        logprob_T, entropy_T = work.statistics(chunk)
        here = loss.tokens.at(chunk)
        extra = sequence_entries(cu_seqlens, here)
        if with_gradients:
            value_T, stats, *upstream = values_and_gradients(loss.loss_fn, logprob_T, entropy_T, here, extra)
            work.add_gradients(*upstream)
        else:
            value_T, stats = token_values(loss.loss_fn, logprob_T, entropy_T, here, extra)
        values.append(value_T)
        statistics.add(stats)
    total = weighted_sum(torch.cat(values), loss.tokens)
    return LossOutput(total.to(work.dtype), statistics.result(loss.tokens))
