"""Log-probability of chosen tokens, and the entropy, from hidden states, without the [T, V] logits.

    z = logit_scale * softcap(h W^T + b)      s = z / temperature
    logprob = s_y - logsumexp(s)              entropy = -sum_v p_v ln p_v,  p = softmax(s)

h is a hidden state, W the output weight, y the target; the softcap is c tanh(u / c). Rows are not shifted:
row t of ``hidden`` scores ``targets[t]``. Gradients: see ``rows`` and ``linear_head``. Four products of T V
H: logits, logits again in the backward, and one for each gradient.

Letters: T rows, H hidden size, V vocabulary.
Order of this file: reference, chunked implementation, public operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.kernels.autograd.compiled import HeadCall, graph_break, linear_logprob_compiled, split_temperature
from rlcore.kernels.autograd.scorer import Gradients, Scorer, Scores, Upstream
from rlcore.kernels.chunks import row_chunks, rows_per_chunk
from rlcore.kernels.dispatch import choose
from rlcore.kernels.linear.head import HeadGradients, LinearHead, Needs, rounded
from rlcore.kernels.linear.problem import HeadInputs, HeadTask, head_inputs, head_task
from rlcore.kernels.operands import unlowered
from rlcore.kernels.softmax_rows import Logprobs, RowStatistics, exponentials_, gradient_, statistics_, wide_dtype
from rlcore.kernels.token.logprob import token_logprob_reference
from rlcore.kernels.token.problem import LogitTask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_logprob_reference(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, task: HeadTask) -> Logprobs:
    """The definition."""
    wide = wide_dtype(hidden_TH.dtype)
    logits_TV = task.rows.known(hidden_TH.to(wide)) @ weight_VH.to(wide).T
    if bias_V is not None:
        logits_TV = logits_TV + bias_V.to(wide)
    if task.softcap is not None:
        logits_TV = task.softcap * torch.tanh(logits_TV / task.softcap)
    return token_logprob_reference(logits_TV, LogitTask(task.rows, with_entropy=task.with_entropy))


def _forward(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, task: HeadTask, *, for_backward: bool
) -> Scores:
    """Four numbers a row are all that is kept; the logits are computed again in the backward."""
    head = LinearHead(weight_VH, bias_V, task.softcap)
    logprob_T, entropy_T, peak_T, total_T = (hidden_TH.new_empty(len(hidden_TH), dtype=head.wide) for _ in range(4))
    for chunk in row_chunks(len(hidden_TH), chunk_rows(hidden_TH, weight_VH, task)):
        rows = task.rows.at(chunk)
        found = statistics_(head.logits(rows.known(hidden_TH[chunk])), rows, with_entropy=task.with_entropy)
        logprob_T[chunk], peak_T[chunk], total_T[chunk] = found.logprob, found.peak, found.total
        if found.entropy is not None:
            entropy_T[chunk] = found.entropy
    logprob_T.masked_fill_(task.rows.is_ignored, 0.0)
    entropy_T.masked_fill_(task.rows.is_ignored, 0.0)
    return Scores(logprob_T, entropy_T if task.with_entropy else None, (peak_T, total_T))


def recomputing_backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    task: HeadTask,
    *,
    needs: Sequence[bool],
    scores: Scores,
    upstream: Upstream,
) -> Gradients:
    """From the peak and the total of each row."""
    head = LinearHead(weight_VH, bias_V, task.softcap)
    gradients = HeadGradients(head, Needs(*needs), len(hidden_TH), task.shard)
    upstream = Upstream(*(task.rows.known_vector(g_T) for g_T in upstream))
    saved = (scores.logprob, scores.entropy, *scores.residuals)
    for chunk in row_chunks(len(hidden_TH), chunk_rows(hidden_TH, weight_VH, task)):
        rows = task.rows.at(chunk)
        known_TH = rows.known(hidden_TH[chunk])
        logits_TV = head.logits(known_TH)
        slope_TV = head.softcap_slope(logits_TV)
        statistics = RowStatistics(*(None if values_T is None else values_T[chunk] for values_T in saved))  # type: ignore[arg-type]
        exp_TV = exponentials_(logits_TV, statistics.peak, rows.sharpness)
        g_T, g_bar_T = (None if g is None else g[chunk] for g in upstream)
        gradients.add(chunk, gradient_(exp_TV, rows, statistics, g_T, g_bar_T), slope_TV, known_TH)
    return rounded(gradients.totals(), (hidden_TH, weight_VH, bias_V))


def chunk_rows(hidden_TH: Tensor, weight_VH: Tensor, task: HeadTask) -> int:
    count = rows_per_chunk if task.shard is None else task.shard.rows_per_chunk
    return count(len(hidden_TH), len(weight_VH), wide_dtype(weight_VH.dtype).itemsize, task.memory_budget_bytes)


linear_logprob_chunked = Scorer(_forward, recomputing_backward, num_residuals=2)
"""Plain torch in chunks of rows, on any device."""


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
    implementation: str | None = None,
) -> Logprobs:
    """Log-probability of ``targets[t]`` given ``hidden[t]``, and the entropy, without ``[T, V]`` logits.

    Args:
        hidden: [T, H]; float32, bfloat16, float16 or float64; any strides. With ``group`` also this rank's [T / G, H].
        weight: [V, H], same dtype. May be the tied embedding.
        targets: [T], int64 or int32 token ids, or ``ignore_index``.
        bias: [V], any float dtype.
        temperature: the sampler's; > 0, a float or [T].
        softcap: > 0; logits become ``softcap * tanh(logits / softcap)`` before the scale and the temperature.
        logit_scale: > 0; multiplies the logits.
        with_entropy: also the (differentiable) entropy.
        ignore_index: rows with this target give 0 and get a gradient of exactly 0, whatever they hold.
        group: a process group over which the vocabulary is split.
        memory_budget_bytes: limit for temporaries of the logits and of their statistics, also for those kept for the
            backward, to spare it making them again; None is ``chunks.DEFAULT_BUDGET_BYTES``.
        implementation: run this one or raise; None chooses.

    Returns:
        ``(logprob, entropy)``, [T] float32 (float64 for float64 inputs), nats, <= 0 and >= 0; entropy is None
        unless asked for. Differentiable in ``hidden``, ``weight`` and ``bias``. A bias of -inf takes its column out;
        where it takes all, scores and gradients are NaN.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above.
        UnsupportedError: no implementation serves, or the one asked for refuses; with the reasons.
    """
    inputs = head_inputs(hidden, weight, bias, targets, group)
    if torch.compiler.is_compiling() and group is None:
        return linear_logprob_compiled(
            HeadCall(
                *inputs,
                targets,
                *split_temperature(temperature),
                softcap,
                logit_scale,
                with_entropy,
                ignore_index,
                memory_budget_bytes,
                implementation,
            )
        )
    return _run(
        inputs,
        targets,
        implementation,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        with_entropy=with_entropy,
        ignore_index=ignore_index,
        group=group,
        memory_budget_bytes=memory_budget_bytes,
    )


@graph_break("linear_logprob with group= exchanges statistics with other ranks")
def _run(inputs: HeadInputs, targets: Tensor, implementation: str | None, **options: Any) -> Logprobs:
    task = head_task(inputs, targets, **options)
    inputs = task.whole(inputs)
    run = choose("linear_logprob", task.query(inputs), implementation).fn
    with unlowered(inputs.hidden.device.type):
        result: Logprobs = run(*inputs, task)
    return result
