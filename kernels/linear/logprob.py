"""Log-probability of chosen tokens, and the entropy, from hidden states, without the [T, V] logits.

    z = logit_scale * softcap(h W^T + b)      s = z / temperature
    logprob = s_y - logsumexp(s)              entropy = -sum_v p_v ln p_v,  p = softmax(s)

h is a hidden state, W the output weight, y the target; the softcap is c tanh(u / c). Rows are not shifted: row t of
``hidden`` scores ``targets[t]``. Gradients: see ``softmax_rows`` and ``head``. Four matrix products of T V H: logits,
logits again in the backward, and one for each gradient.

Letters: T rows, H hidden size, V vocabulary.
Order of this file: public operator, reference, chunked implementation, the operator in compiled code. ``rows``,
``tiled`` and ``vocab_parallel`` have the other implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlcore.kernels.autograd.compiled import CompiledOperator, graph_break, split_temperature
from rlcore.kernels.autograd.forward_backward import ForwardBackward, Gradients, GradOutput, LogprobOutput
from rlcore.kernels.chunks import row_chunks
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.linear.head import HeadGradients, LinearHead, Needs, rounded
from rlcore.kernels.linear.problem import FlatRows, HeadInputs, LinearHeadProblem, head_inputs, linear_head_problem
from rlcore.kernels.operands import unlowered
from rlcore.kernels.row_stats import checked_row_stats
from rlcore.kernels.softmax_rows import (
    NO_ROWS,
    Logprobs,
    RowStatistics,
    RowStatsBuffer,
    exponentials_,
    gradient_,
    statistics_,
    wide_dtype,
)
from rlcore.kernels.token.logprob import shaped_like, token_logprob_reference
from rlcore.kernels.token.problem import LogitsProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    ignore_index: int = -100,
    group: ProcessGroup | None = None,
    memory_budget_bytes: int | None = None,
    row_stats: Sequence[str] = (),
    implementation: str | None = None,
) -> Logprobs:
    """Return the log-probability of ``targets[t]`` given ``hidden[t]``, and the entropy, without ``[T, V]`` logits.

    Args:
        hidden: [T, H], or [..., T, H] such as [N, L, H]; float32, bfloat16, float16 or float64; any strides. With
            ``group`` also this rank's [T / G, H].
        weight: [V, H], any of these dtypes. May be the tied embedding. Where the dtypes of hidden and weight differ,
            both are used in the one to which torch promotes them: bfloat16 and float32 in float32, of which a copy is
            made. Each gets its gradient in its own dtype, rounded once.
        targets: [T], or [..., T]; int64 or int32 token ids, or ``ignore_index``.
        bias: [V], any float dtype.
        temperature: the sampler's; > 0, a float or one for each target.
        softcap: > 0; logits become ``softcap * tanh(logits / softcap)`` before the scale and the temperature. A head
            that scales by s first and then caps at c, as TRL's, is ``softcap=c / s, logit_scale=s``.
        logit_scale: > 0; multiplies the logits.
        with_entropy: also the (differentiable) entropy.
        ignore_index: rows with this target give 0 and get a gradient of exactly 0, whatever they hold.
        group: a process group over which the vocabulary is split.
        memory_budget_bytes: limit for temporaries of the logits and of their statistics, and for what of these is saved
            so that the backward need not compute it again; None is ``chunks.DEFAULT_BUDGET_BYTES``.
        row_stats: names of more numbers of each row, found in ``row_stats`` of the result: "sum_squares" (of the
            probabilities), "mean_logit" (of the logits after softcap, scale and temperature, over V) and "is_top1"
            (bool: no logit is above the target's, and none before it equals that). They have no gradient.
        implementation: run this one or raise; None chooses.

    Returns:
        ``(logprob, entropy)``, shaped like ``targets``, float32 (float64 where hidden or weight is), nats, <= 0 and
        >= 0; entropy is None unless asked for. Differentiable in ``hidden``, ``weight`` and ``bias``. A bias of -inf
        takes its column out; where it takes all, scores and gradients are NaN.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above.
        UnsupportedError: no implementation serves, or the one asked for refuses; with the reasons.
    """
    rows = FlatRows.of(hidden, targets, temperature)
    inputs = head_inputs(rows.hidden, weight, bias, rows.targets, group)
    if torch.compiler.is_compiling() and group is None:
        found = linear_logprob_compiled(
            LinearLogprobCall(
                *inputs,
                rows.targets,
                *split_temperature(rows.temperature),
                softcap,
                logit_scale,
                with_entropy,
                ignore_index,
                memory_budget_bytes,
                implementation,
                ",".join(checked_row_stats(row_stats)),
            )
        )
        return shaped_like(targets, found, row_stats)
    return _run(
        inputs,
        rows.targets,
        targets,
        implementation,
        temperature=rows.temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        with_entropy=with_entropy,
        ignore_index=ignore_index,
        group=group,
        memory_budget_bytes=memory_budget_bytes,
        row_stats=row_stats,
    )


@graph_break("linear_logprob with group= exchanges statistics with other ranks")
def _run(inputs: HeadInputs, target_T: Tensor, targets: Tensor, implementation: str | None, **options: Any) -> Logprobs:
    """Return the scores of ``target_T`` in the shape of ``targets``; all of it is one graph break."""
    problem = linear_head_problem(inputs, target_T, **options)
    inputs = problem.whole(inputs)
    run = choose("linear_logprob", problem.query(inputs), implementation).fn
    with unlowered(inputs.hidden.device.type):
        found = shaped_like(targets, run(*inputs, problem), problem.row_stats)
    problem.check_tokens_late(len(inputs.weight))
    return found


def linear_logprob_reference(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem
) -> Logprobs:
    """Compute the definition."""
    wide = wide_dtype(hidden_TH.dtype)
    logits_TV = problem.rows.zero_ignored_rows(hidden_TH.to(wide)) @ weight_VH.to(wide).T
    if bias_V is not None:
        logits_TV = logits_TV + bias_V.to(wide)
    if problem.softcap is not None:
        logits_TV = problem.softcap * torch.tanh(logits_TV / problem.softcap)
    return token_logprob_reference(
        logits_TV, LogitsProblem(problem.rows, with_entropy=problem.with_entropy, row_stats=problem.row_stats)
    )


def _forward(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, problem: LinearHeadProblem, *, for_backward: bool
) -> LogprobOutput:
    """Save four numbers a row; the backward computes the logits again."""
    head = LinearHead(weight_VH, bias_V, problem.softcap)
    logprob_T, entropy_T, peak_T, total_T = (hidden_TH.new_empty(len(hidden_TH), dtype=head.wide) for _ in range(4))
    numbers = RowStatsBuffer(problem.row_stats, logprob_T)
    for chunk in row_chunks(len(hidden_TH), problem.chunk_rows(hidden_TH, weight_VH)):
        rows = problem.rows.at(chunk)
        logits_TV = head.logits(rows.zero_ignored_rows(hidden_TH[chunk]))
        found = statistics_(logits_TV, rows, with_entropy=problem.with_entropy, row_stats=problem.row_stats)
        numbers.write(chunk, found.row_stats)
        logprob_T[chunk], peak_T[chunk], total_T[chunk] = found.logprob, found.peak, found.total
        if found.entropy is not None:
            entropy_T[chunk] = found.entropy
    logprob_T.masked_fill_(problem.rows.ignored, 0.0)
    entropy_T.masked_fill_(problem.rows.ignored, 0.0)
    return LogprobOutput(
        logprob_T,
        entropy_T if problem.with_entropy else None,
        (peak_T, total_T),
        row_stats=numbers.result(problem.rows),
    )


def recomputing_backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    problem: LinearHeadProblem,
    *,
    needs: Sequence[bool],
    output: LogprobOutput,
    grad_output: GradOutput,
) -> Gradients:
    """Compute the gradients from the peak and the total of each row, and the logits again."""
    head = LinearHead(weight_VH, bias_V, problem.softcap)
    gradients = HeadGradients(head, Needs(*needs), len(hidden_TH), problem.shard)
    grad_output = GradOutput(*(problem.rows.zero_ignored(g_T) for g_T in grad_output))
    saved = (output.logprob, output.entropy, *output.residuals)
    for chunk in row_chunks(len(hidden_TH), problem.chunk_rows(hidden_TH, weight_VH)):
        rows = problem.rows.at(chunk)
        masked_TH = rows.zero_ignored_rows(hidden_TH[chunk])
        logits_TV = head.logits(masked_TH)
        derivative_TV = head.softcap_derivative(logits_TV)
        statistics = RowStatistics(*(None if values_T is None else values_T[chunk] for values_T in saved))  # type: ignore[arg-type]
        exp_TV = exponentials_(logits_TV, statistics.peak, rows.inverse_temperature)
        g_T, g_bar_T = (None if g is None else g[chunk] for g in grad_output)
        gradients.add(chunk, gradient_(exp_TV, rows, statistics, g_T, g_bar_T), derivative_TV, masked_TH)
    return rounded(gradients.totals(), (hidden_TH, weight_VH, bias_V))


linear_logprob_chunked = ForwardBackward(_forward, recomputing_backward, num_residuals=2)
"""Plain torch in chunks of rows, on any device."""


class LinearLogprobCall(NamedTuple):
    """The arguments of the operator in compiled code."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperature: float
    temperatures: Tensor | None
    """One for each target; None: ``temperature`` is that of all."""
    softcap: float | None
    logit_scale: float
    with_entropy: bool
    ignore_index: int
    memory_budget_bytes: int | None
    implementation: str | None
    row_names: str = ""
    """The names of ``row_stats`` with commas between them: autograd would want a gradient for each entry of a list."""

    @property
    def row_stats(self) -> tuple[str, ...]:
        return tuple(name for name in self.row_names.split(",") if name)

    def query(self) -> Query:
        problem = LinearHeadProblem(
            NO_ROWS, self.softcap, self.with_entropy, self.memory_budget_bytes, row_stats=self.row_stats
        )
        return problem.query(HeadInputs(self.hidden, self.weight, self.bias))

    def prepared(self) -> tuple[Sequence[Tensor | None], LinearHeadProblem]:
        inputs = HeadInputs(self.hidden, self.weight, self.bias)
        problem = linear_head_problem(
            inputs,
            self.targets,
            temperature=self.temperature if self.temperatures is None else self.temperatures,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            with_entropy=self.with_entropy,
            ignore_index=self.ignore_index,
            group=None,
            memory_budget_bytes=self.memory_budget_bytes,
            row_stats=self.row_stats,
        )
        problem.check_tokens_late(len(self.weight))
        return inputs, problem


linear_logprob_compiled = CompiledOperator(
    "linear_logprob",
    LinearLogprobCall,
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float temperature, Tensor? temperatures, "
    "float? softcap, float logit_scale, bool with_entropy, int ignore_index, int? memory_budget_bytes, "
    "str? implementation, str row_names",
    num_tensors=3,
)
