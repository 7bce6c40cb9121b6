"""Log-probability of chosen tokens, and the entropy, from hidden states, without the [T, V] logits.

    z = logit_scale * softcap(h W^T + b)      s = z / temperature
    logprob = s_y - logsumexp(s)              entropy = -sum_v p_v ln p_v,  p = softmax(s)

h is a hidden state, W the output weight, y the target; the softcap is c tanh(u / c). Rows are not shifted:
row t of ``hidden`` scores ``targets[t]``. Gradients: see ``rows`` and ``linear_head``. Four products of T V
H: logits, logits again in the backward, and one for each gradient.

Letters: T rows, H hidden size, V vocabulary.
Order of this file: reference, autograd function, chunked implementation, public operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.kernels.chunks import row_chunks, rows_per_chunk
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.linear_head import HeadGradients, LinearHead, Needs, rounded
from rlcore.kernels.operands import check_head, checked_targets, checked_temperature, lowered_as_linear
from rlcore.kernels.rows import (
    Logprobs,
    Rows,
    RowStatistics,
    exponentials_,
    gradient_,
    statistics_,
    wide_dtype,
)
from rlcore.kernels.token_logprob import token_logprob_reference

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_logprob_reference(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    ignore_index: int = -100,
) -> Logprobs:
    """The definition."""
    wide = wide_dtype(hidden_TH.dtype)
    known_TH = hidden_TH.to(wide).masked_fill((target_T == ignore_index)[:, None], 0.0)
    logits_TV = known_TH @ weight_VH.to(wide).T
    if bias is not None:
        logits_TV = logits_TV + bias.to(wide)
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    return token_logprob_reference(
        logits_TV,
        target_T,
        temperature=temperature / logit_scale,
        with_entropy=with_entropy,
        ignore_index=ignore_index,
    )


class _Task(NamedTuple):
    """Everything but the tensors that get gradients."""

    rows: Rows
    softcap: float | None
    with_entropy: bool
    rows_per_chunk: int
    needs: Needs


class _LinearLogprob(torch.autograd.Function):
    """Saves the inputs and four numbers a row; the logits are computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, task: _Task
    ) -> tuple[Tensor, Tensor | None]:
        head = LinearHead(weight_VH, bias_V, task.softcap)
        num_rows = len(hidden_TH)
        logprob_T, entropy_T, peak_T, total_T = (hidden_TH.new_empty(num_rows, dtype=head.wide) for _ in range(4))
        for chunk in row_chunks(num_rows, task.rows_per_chunk):
            rows = task.rows.at(chunk)
            found = statistics_(head.logits(rows.known(hidden_TH[chunk])), rows, with_entropy=task.with_entropy)
            logprob_T[chunk], peak_T[chunk], total_T[chunk] = found.logprob, found.peak, found.total
            if found.entropy is not None:
                entropy_T[chunk] = found.entropy
        logprob_T.masked_fill_(task.rows.is_ignored, 0.0)
        entropy_T.masked_fill_(task.rows.is_ignored, 0.0)
        ctx.task = task
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, logprob_T, entropy_T, peak_T, total_T)
        return logprob_T, entropy_T if task.with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        task: _Task = ctx.task
        hidden_TH, weight_VH, bias_V, *saved = ctx.saved_tensors
        head = LinearHead(weight_VH, bias_V, task.softcap)
        gradients = HeadGradients(head, task.needs, len(hidden_TH))
        upstream = [task.rows.known_vector(g_T) for g_T in (g_logprob_T, g_entropy_T)]
        for chunk in row_chunks(len(hidden_TH), task.rows_per_chunk):
            rows = task.rows.at(chunk)
            known_TH = rows.known(hidden_TH[chunk])
            logits_TV = head.logits(known_TH)
            slope_TV = head.softcap_slope(logits_TV)
            statistics = RowStatistics(*(values_T[chunk] for values_T in saved))
            exp_TV = exponentials_(logits_TV, statistics.peak, rows.sharpness)
            g_T, g_bar_T = (None if g is None else g[chunk] for g in upstream)
            gradients.add(chunk, gradient_(exp_TV, rows, statistics, g_T, g_bar_T), slope_TV, known_TH)
        return (*rounded(gradients.totals(), (hidden_TH, weight_VH, bias_V)), None)


def linear_logprob_chunked(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    with_entropy: bool,
    ignore_index: int,
    memory_budget_bytes: int | None = None,
) -> Logprobs:
    """Plain torch in chunks of rows, on any device."""
    wide = wide_dtype(weight_VH.dtype)
    rows = rows_per_chunk(len(hidden_TH), len(weight_VH), wide.itemsize, memory_budget_bytes)
    needs = Needs.of(hidden_TH, weight_VH, bias)
    task = _Task(Rows.of(target_T, ignore_index, temperature, logit_scale), softcap, with_entropy, rows, needs)
    return Logprobs(*_LinearLogprob.apply(hidden_TH, weight_VH, bias, task))  # type: ignore[no-untyped-call]


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
        hidden: [T, H]; float32, bfloat16, float16 or float64; any strides.
        weight: [V, H], same dtype. May be the tied embedding.
        targets: [T], int64 or int32 token ids, or ``ignore_index``.
        bias: [V], any float dtype.
        temperature: the sampler's; > 0, a float or [T].
        softcap: > 0; logits become ``softcap * tanh(logits / softcap)`` before the scale and the temperature.
        logit_scale: > 0; multiplies the logits.
        with_entropy: also the (differentiable) entropy.
        ignore_index: rows with this target give 0 and get a gradient of exactly 0, whatever they hold.
        group: a process group over which the vocabulary is split.
        memory_budget_bytes: limit for temporaries of the logits; None is ``chunks.DEFAULT_BUDGET_BYTES``.
        implementation: run this one or raise; None chooses.

    Returns:
        ``(logprob, entropy)``, [T] float32 (float64 for float64 inputs), nats, <= 0 and >= 0; entropy is None
        unless asked for. Differentiable in ``hidden``, ``weight`` and ``bias``.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above.
        UnsupportedError: no implementation serves, or the one asked for refuses; with the reasons.
    """
    hidden, weight, bias = lowered_as_linear(hidden, weight, bias)
    check_head(hidden, weight, targets, bias=bias, softcap=softcap, logit_scale=logit_scale)
    temperature = checked_temperature(temperature, targets, ignore_index, wide_dtype(weight.dtype))
    targets = checked_targets(targets, len(weight), ignore_index)
    flags = {
        "bias": bias is not None,
        "entropy": with_entropy,
        "softcap": softcap is not None,
        "memory_budget": memory_budget_bytes is not None,
        "group": group is not None,
    }
    options = frozenset(name for name, is_used in flags.items() if is_used)
    query = Query(hidden.device.type, hidden.dtype, hidden.shape[1], len(weight), options)
    asked_for = {"group": group, "memory_budget_bytes": memory_budget_bytes}
    with torch.autocast(hidden.device.type, enabled=False):
        result: Logprobs = choose("linear_logprob", query, implementation).fn(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            with_entropy=with_entropy,
            ignore_index=ignore_index,
            **{name: value for name, value in asked_for.items() if value is not None},
        )
    return result
