"""Any loss of log-probabilities, from hidden states, with its gradients computed in the forward pass.

    loss = sum_t token_weight[t] * value[t]      value, stats = loss_fn(logprob, entropy, per_token)

logprob and entropy are those of ``linear_logprob``. Each chunk has these steps: its logits and their statistics; the
loss on [t] vectors and its two small gradients by autograd; the gradient of the logits, in place; from it the gradients
of hidden states, weight and bias. These are three matrix products of T V H. A log-probability whose gradient is not
known in advance takes four. The backward only multiplies by the gradient of the loss. A loss of sequences takes four
where one sequence is longer than a chunk (``loss_in_two_passes``).

Letters: T rows, H hidden size, V vocabulary.
Order of this file: public operator, reference, chunked implementation. ``rows``, ``tiled`` and ``vocab_parallel`` have
the other implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rlcore.arguments import LIST, WHOLE, optional, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.autograd.compiled import graph_break
from rlcore.kernels.autograd.forward_backward import ForwardBackward
from rlcore.kernels.dispatch import choose
from rlcore.kernels.linear.head import HeadGradients, LinearHead, Needs
from rlcore.kernels.linear.logprob import linear_logprob_chunked, linear_logprob_reference
from rlcore.kernels.linear.loss_in_chunks import (
    LossProblem,
    SummingWork,
    loss_in_chunks,
    loss_in_two_passes,
    sequence_entries,
)
from rlcore.kernels.linear.problem import FlatRows, HeadInputs, LinearHeadProblem, head_inputs, linear_head_problem
from rlcore.kernels.losses.evaluate import SequenceStatistics, TokenInputs, check_tokens, flat_tokens, loss_of_tokens
from rlcore.kernels.losses.interface import LOSS, LossFn, LossOutput, checked_edges, sequence_level
from rlcore.kernels.losses.mixing import refusing_mixtures
from rlcore.kernels.operands import TENSOR, TENSORS, check_no_nan, unlowered
from rlcore.kernels.softmax_rows import RowStatistics, ScaledRows, gradient_, statistics_, wide_dtype
from rlcore.kernels.vocab_shard import partial_statistics_
from rlcore.settings import is_debugging

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@graph_break("linear_loss runs loss_fn eagerly, chunk by chunk; compile loss_fn instead: torch.compile(loss_fn)")
@takes(
    "linear_loss", targets=TENSOR, loss_fn=LOSS, per_token=TENSORS, token_weight=TENSOR, stats_weight=optional(TENSOR),
    sequence_stats=LIST, cu_seqlens=optional(TENSOR), bias=optional(TENSOR), ignore_index=WHOLE,
)  # fmt: skip
def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: LossFn,
    *,
    per_token: Mapping[str, Tensor],
    token_weight: Tensor,
    stats_weight: Tensor | None = None,
    sequence_stats: Sequence[str] = (),
    cu_seqlens: Tensor | None = None,
    with_entropy: bool = True,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    group: ProcessGroup | None = None,
    memory_budget_bytes: int | None = None,
    implementation: str | None = None,
) -> LossOutput:
    """Compute ``sum_t token_weight[t] * loss_fn(logprob, entropy, per_token)[t]`` without ``[T, V]`` logits.

    A token counts unless its target is ``ignore_index`` or its weight is 0. Others contribute exactly
    nothing, to the loss and to every gradient, whatever they hold, NaN included.

    Args:
        hidden: [T, H]; float32, bfloat16, float16 or float64; any strides. With ``group`` also this rank's [T / G, H].
            [..., T, H], such as [N, L, H], is taken as all rows one after the other: then targets, the entries of
            per_token, token_weight, stats_weight and a tensor of temperatures have these leading dimensions, too, and
            cu_seqlens counts all rows.
        weight: [V, H], any of these dtypes. May be the tied embedding. Where the dtypes of hidden and weight differ,
            both are used in the one to which torch promotes them, as in ``linear_logprob``.
        targets: [T], int64 or int32 token ids, or ``ignore_index``.
        loss_fn: see ``rlcore.kernels.losses.interface``; a plain PyTorch function of [t] vectors, run chunk
            by chunk (on whole sequences if marked ``@sequence_level``). Gradients flow to ``logprob`` and ``entropy``
            alone: what it closes over, such as a learnable coefficient, gets none (``RLCORE_DEBUG=1`` refuses that);
            ``token_loss`` gives it one.
        per_token: [T] or [T, ...] tensors that ``loss_fn`` reads, without gradient.
        token_weight: [T], any float dtype; see ``rlcore.ops.token_weights``.
        stats_weight: [T], numbers >= 0 or bool, by which ``_mean`` statistics are averaged over the tokens that count;
            None is ``token_weight``. The mask of tokens gives plain means over tokens, as peers report them.
        sequence_stats: names of ``_mean`` statistics, such as "clip_low_mean", of which the plain mean over each
            sequence's tokens that count is taken, too; reported are its mean, minimum and maximum over the sequences:
            ``clip_low_sequence_mean``, ``clip_low_sequence_min``, ``clip_low_sequence_max``. It needs ``cu_seqlens``.
        cu_seqlens: [N + 1] integers from 0 to T; needed by sequence-level losses and ``sequence_stats``. Reading it
            waits for its device: a CPU tensor costs nothing.
        with_entropy: compute the entropy; False passes None to ``loss_fn``.
        bias: [V], any float dtype.
        temperature: the sampler's; > 0, a float or [T].
        softcap: > 0; logits become ``softcap * tanh(logits / softcap)`` before the scale and the temperature. A head
            that scales by s first and then caps at c, as TRL's, is ``softcap=c / s, logit_scale=s``.
        logit_scale: > 0; multiplies the logits.
        ignore_index: the target of rows that do not count.
        group: a process group over which the vocabulary is split.
        memory_budget_bytes: limit of memory beyond the gradients and their float32 accumulators; None is
            ``chunks.DEFAULT_BUDGET_BYTES``. Where a sequence-level loss has a longer sequence than it
            allows, all log-probabilities come first, and the logits are computed again for the gradients.
        implementation: run this one or raise; None chooses.

    Returns:
        ``(loss, stats)``: a scalar, differentiable in ``hidden``, ``weight`` and ``bias`` and 0 if no token
        counts, and scalars by name. Nothing waits for the device.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above, or a ``loss_fn`` that returns
            them.
        UnsupportedError: no implementation serves, or the one asked for refuses; with the reasons.
    """
    if targets.dim() > 1:
        per_token, token_weight, stats_weight = flat_tokens(targets, per_token, token_weight, stats_weight)
    hidden, targets, temperature = FlatRows.of(hidden, targets, temperature)
    inputs = head_inputs(hidden, weight, bias, targets, group)
    check_tokens("targets", targets, per_token, token_weight, stats_weight)
    token_weight, targets = _counted(token_weight.detach(), targets, ignore_index)
    check_no_nan("token_weight", token_weight)
    problem = linear_head_problem(
        inputs,
        targets,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        with_entropy=with_entropy,
        ignore_index=ignore_index,
        group=group,
        memory_budget_bytes=memory_budget_bytes,
    )
    inputs = problem.whole(inputs)
    is_sequence_level = isinstance(loss_fn, sequence_level)
    loss = LossProblem(
        refusing_mixtures(loss_fn) if is_debugging() else loss_fn,
        TokenInputs.of(
            per_token,
            token_weight.to(wide_dtype(inputs.weight.dtype)),
            ~problem.rows.ignored,
            stats_weight,
            SequenceStatistics.of(sequence_stats, cu_seqlens, targets, "hidden"),
        ),
        _sequence_edges(cu_seqlens, per_token, len(targets)) if is_sequence_level else None,
    )
    query = problem.query(inputs, *(["sequence_level"] if is_sequence_level else []))
    run = choose("linear_loss", query, implementation).fn
    with unlowered(hidden.device.type):
        result: LossOutput = run(*inputs, problem, loss)
    problem.check_tokens_late(len(inputs.weight))
    return result


def _counted(weight_T: Tensor, target_T: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return weights and targets: tokens of weight 0 become ignored, and ignored tokens get weight 0."""
    is_left_out_T = (target_T == ignore_index) | (weight_T == 0)
    return weight_T.masked_fill(is_left_out_T, 0.0), target_T.masked_fill(is_left_out_T, ignore_index)


def _sequence_edges(cu_seqlens: Tensor | None, per_token: Mapping[str, Tensor], num_rows: int) -> list[int]:
    edges: list[int] = checked_edges(cu_seqlens, per_token, "linear_loss", "hidden").tolist()
    if edges[0] != 0 or edges[-1] != num_rows or edges != sorted(edges):
        raise InvalidInputError(f"cu_seqlens must rise from 0 to the {num_rows} rows of hidden; got {edges}")
    return edges


def linear_loss_reference(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem, loss: LossProblem
) -> LossOutput:
    """Compute the definition."""
    logprobs = linear_logprob_reference(hidden_TH, weight_VH, bias_V, problem)
    extra = sequence_entries(loss.cu_seqlens, loss.tokens)
    return loss_of_tokens(loss.loss_fn, *logprobs, loss.tokens, extra)


class _HeadWork(SummingWork):
    """Plain torch, on any device."""

    def __init__(self, inputs: HeadInputs, problem: LinearHeadProblem) -> None:
        self.head, needs = LinearHead(inputs.weight, inputs.bias, problem.softcap), Needs.of(*inputs)
        self.dtype = self.head.wide
        self._hidden_TH, self._problem = inputs.hidden.detach(), problem
        self._gradients = HeadGradients(self.head, needs, len(inputs.hidden), problem.shard) if any(needs) else None
        self._last: tuple[slice, ScaledRows, Tensor, Tensor, Tensor | None, RowStatistics] | None = None

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        self._last = None  # frees the memory of the chunk before
        rows = self._problem.rows.at(chunk)
        masked_TH = rows.zero_ignored_rows(self._hidden_TH[chunk])
        logits_TV = self.head.logits(masked_TH)
        derivative_TV = None if self._gradients is None else self.head.softcap_derivative(logits_TV)
        found = self._statistics_(logits_TV, rows)
        self._last = (chunk, rows, masked_TH, logits_TV, derivative_TV, found)
        return rows.zero_ignored(found.logprob), rows.zero_ignored(found.entropy)

    def _statistics_(self, logits_TV: Tensor, rows: ScaledRows) -> RowStatistics:
        if self._problem.shard is None:
            return statistics_(logits_TV, rows, with_entropy=self._problem.with_entropy)
        return self._problem.shard.merged(
            partial_statistics_(logits_TV, rows, with_entropy=self._problem.with_entropy), rows
        )

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        assert self._last is not None and self._gradients is not None
        chunk, rows, masked_TH, exp_TV, derivative_TV, found = self._last
        g_logprob_T, g_entropy_T = rows.zero_ignored(g_logprob_T), rows.zero_ignored(g_entropy_T)
        dlogits_TV = gradient_(exp_TV, rows, found, g_logprob_T, g_entropy_T)
        self._gradients.add(chunk, dlogits_TV, derivative_TV, masked_TH)


def linear_loss_chunked(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    problem: LinearHeadProblem,
    loss: LossProblem,
    *,
    logprob: ForwardBackward = linear_logprob_chunked,
) -> LossOutput:
    """Compute the loss in chunks of rows or whole sequences, on any device. ``logprob`` scores longer sequences."""
    inputs = HeadInputs(hidden_TH, weight_VH, bias_V)
    rows = problem.chunk_rows(hidden_TH, weight_VH)
    if loss.exceeds(rows):
        return loss_in_two_passes(logprob, inputs, problem, loss)
    return loss_in_chunks(_HeadWork(inputs, problem), inputs, loss, rows)
