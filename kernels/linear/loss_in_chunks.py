"""A loss of log-probabilities whose gradients are computed in its forward pass, chunk by chunk.

An implementation of ``linear_loss`` is a ``ChunkWork``: what it does with a chunk of rows before and after the loss
function. The rest is here: the loop over chunks, the loss function and its two small gradients, the sums, and the
autograd function whose backward multiplies by the gradient of the loss.

``loss_in_two_passes`` is for a loss of sequences of which one is longer than a chunk. The first pass computes all
log-probabilities, the second their gradients once the whole loss is known. Both are those of ``linear_logprob`` of the
same implementation, within the memory budget. Where it saves nothing in between, it computes the logits twice.

Letters: T rows.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.kernels.autograd.forward_backward import (
    ForwardBackward,
    Gradients,
    GradOutput,
    LogprobOutput,
    differentiable_once,
)
from rlcore.kernels.chunks import joined, row_chunks, sequence_chunks
from rlcore.kernels.linear.head import HeadGradients, Needs
from rlcore.kernels.linear.problem import HeadInputs, LinearHeadProblem
from rlcore.kernels.losses.evaluate import (
    Statistics,
    TokenInputs,
    token_values,
    values_and_gradients,
    weighted_sum,
)
from rlcore.kernels.losses.interface import LossFn, LossOutput
from rlcore.kernels.softmax_rows import wide_dtype

_Chunks = Iterable[tuple[slice, list[int] | None]]
"""The rows of each chunk, and the ``cu_seqlens`` in it if chunks are of whole sequences."""


class LossProblem(NamedTuple):
    """The arguments of an implementation of ``linear_loss`` besides a head's inputs and problem."""

    loss_fn: LossFn
    tokens: TokenInputs
    cu_seqlens: list[int] | None
    """Given for a sequence-level loss: its chunks end where sequences end."""

    def exceeds(self, rows_per_chunk: int) -> bool:
        """Return True if a sequence, which must be whole, does not fit into a chunk: see ``loss_in_two_passes``."""
        edges = self.cu_seqlens or []
        return any(end - start > rows_per_chunk for start, end in itertools.pairwise(edges))


class UnscaledGradients(NamedTuple):
    """The gradients of the inputs, to be multiplied by the gradient of the loss."""

    saved: Sequence[Tensor | None]
    """The tensors that autograd saves for them."""
    times: Callable[[Sequence[Tensor | None], Tensor], Sequence[Tensor | None]]
    """``times(saved, factor)``, with a scalar on their device, returns each gradient in the dtype of its input,
    rounded once."""


class ChunkWork(ABC):
    """The work of an implementation on each chunk in turn."""

    dtype: torch.dtype
    """The dtype of log-probabilities and loss."""

    @abstractmethod
    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies (None if not asked for) of these rows; 0 in ignored rows."""

    @abstractmethod
    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        """Add the gradients of what ``statistics`` last returned. In ignored rows they may hold any value."""

    @abstractmethod
    def gradients(self, inputs: HeadInputs) -> UnscaledGradients:
        """Return the gradients of all chunks. It is the last call."""


class SummingWork(ChunkWork):
    """A ``ChunkWork`` that adds up the gradients of its chunks."""

    _gradients: HeadGradients | None
    """The sums so far; None if no gradient is asked for."""

    def gradients(self, inputs: HeadInputs) -> UnscaledGradients:
        assert self._gradients is not None
        scaled, dtypes = self.scaled, [None if x is None else x.dtype for x in inputs]

        def times(totals: Sequence[Tensor | None], factor: Tensor) -> list[Tensor | None]:
            pairs = zip(totals, dtypes, strict=True)
            return [None if x is None or dtype is None else scaled(x, factor, dtype) for x, dtype in pairs]

        return UnscaledGradients(self._gradients.totals(), times)

    @staticmethod
    def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``total`` times a scalar on its device, rounded once to ``dtype``."""
        return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))


def loss_in_chunks(work: ChunkWork, inputs: HeadInputs, loss: LossProblem, rows_per_chunk: int) -> LossOutput:
    """Compute the loss of ``inputs`` by ``work``, in chunks of rows or of whole sequences."""
    chunks: _Chunks
    if loss.cu_seqlens is None:
        chunks = ((chunk, None) for chunk in row_chunks(len(inputs.hidden), rows_per_chunk))
    else:
        chunks = sequence_chunks(loss.cu_seqlens, rows_per_chunk)
    if not any(Needs.of(*inputs)):
        return _summed(work, loss, chunks, with_gradients=False)
    total, stats = _summed(work, loss, chunks, with_gradients=True)
    return LossOutput(_LossFunction.apply(total, work, *inputs), stats)  # type: ignore[no-untyped-call]


def loss_in_two_passes(
    logprob: ForwardBackward, inputs: HeadInputs, problem: LinearHeadProblem, loss: LossProblem
) -> LossOutput:
    """Compute the loss of all rows at once from the log-probabilities of ``logprob``."""
    return loss_in_chunks(_TwoPassWork(logprob, inputs, problem), inputs, loss, max(len(inputs.hidden), 1))


def sequence_entries(cu_seqlens: list[int] | None, tokens: TokenInputs) -> dict[str, Tensor]:
    """Return the entries of ``per_token`` that only a sequence-level loss is given."""
    if cu_seqlens is None:
        return {}
    # torch.tensor(device=...) would wait for the products of the chunk
    edges_N = torch.tensor(cu_seqlens).to(tokens.weight.device, non_blocking=True)
    return {"cu_seqlens": edges_N, "token_mask": tokens.is_counted.clone()}


class _TwoPassWork(ChunkWork):
    """All rows are one chunk.

    The first backward, which multiplies by the gradient of the loss too, uses up the workspace that the forward saved.
    A second backward computes again what it held.
    """

    def __init__(self, logprob: ForwardBackward, inputs: HeadInputs, problem: LinearHeadProblem) -> None:
        self.dtype = wide_dtype(inputs.weight.dtype)
        self._logprob, self._inputs, self._problem = logprob, inputs, problem
        self._needs = Needs.of(*inputs)
        self._output: LogprobOutput | None = None
        self._grad_output: GradOutput | None = None

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        self._output = self._logprob.forward(*self._inputs, self._problem, for_backward=any(self._needs))
        return self._output.logprob, self._output.entropy

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        self._grad_output = GradOutput(g_logprob_T, g_entropy_T)

    def gradients(self, inputs: HeadInputs) -> UnscaledGradients:
        backward, output, grad_output = self._logprob.backward, self._output, self._grad_output
        needs, problem = self._needs, self._problem
        assert output is not None and grad_output is not None
        saved, output, is_workspace_used = (*inputs, *output.workspace), output._replace(workspace=()), False

        def times(tensors: Sequence[Any], factor: Tensor) -> Gradients:
            nonlocal is_workspace_used
            hidden_TH, weight_VH, bias_V, *workspace = tensors
            last, is_workspace_used = output._replace(workspace=() if is_workspace_used else tuple(workspace)), True
            scaled = GradOutput(*(None if g_T is None else g_T * factor for g_T in grad_output))
            return backward(hidden_TH, weight_VH, bias_V, problem, needs=needs, output=last, grad_output=scaled)

        return UnscaledGradients(saved, times)


class _LossFunction(torch.autograd.Function):
    """A loss whose gradients are known but for the factor that the backward is given."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, work: ChunkWork, *inputs: Any) -> Tensor:
        found = work.gradients(HeadInputs(*inputs))
        ctx.save_for_backward(*found.saved)
        ctx.times = found.times
        return loss.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_loss: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.times(ctx.saved_tensors, g_loss))


@torch.no_grad()
def _summed(work: ChunkWork, loss: LossProblem, chunks: _Chunks, *, with_gradients: bool) -> LossOutput:
    values: list[Tensor] = []
    statistics = Statistics()
    for chunk, cu_seqlens in chunks:
        logprob_T, entropy_T = work.statistics(chunk)
        here = loss.tokens.at(chunk)
        extra = sequence_entries(cu_seqlens, here)
        if with_gradients:
            value_T, stats, *grad_output = values_and_gradients(loss.loss_fn, logprob_T, entropy_T, here, extra)
            work.add_gradients(*grad_output)
        else:
            value_T, stats = token_values(loss.loss_fn, logprob_T, entropy_T, here, extra)
        values.append(value_T)
        statistics.add(stats)
    total = weighted_sum(joined(values), loss.tokens)
    return LossOutput(total.to(work.dtype), statistics.result(loss.tokens))
