"""Any loss of log-probabilities, from hidden states, with its gradients formed in the forward pass.

    loss = sum_t token_weight[t] * value[t]      value, stats = loss_fn(logprob, entropy, per_token)

logprob and entropy as in ``linear_logprob``. Chunk by chunk: logits, their statistics, the loss on [t]
vectors and its two small gradients by autograd, the gradient of the logits in their place, and from it those
of hidden states, weight and bias. Three products of T V H instead of the four of a log-probability whose
gradient is not known in advance; the backward only multiplies by the upstream scalar.

Letters: T rows, H hidden size, V vocabulary.
Order of this file: reference, autograd function, chunked implementation, public operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.errors import InvalidInputError
from rlcore.kernels.chunks import row_chunks, rows_per_chunk, sequence_chunks
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.linear_head import HeadGradients, LinearHead, Needs, Totals
from rlcore.kernels.linear_logprob import linear_logprob_reference
from rlcore.kernels.losses.evaluate import (
    Statistics,
    TokenInputs,
    loss_and_gradients,
    refusing_mixed_tokens,
    weighted_loss,
)
from rlcore.kernels.losses.interface import LossFn, sequence_level
from rlcore.kernels.operands import (
    check_constant,
    check_float,
    check_head,
    check_same_device,
    checked_targets,
    checked_temperature,
    is_debugging,
    lowered_as_linear,
)
from rlcore.kernels.rows import Rows, RowStatistics, gradient_, statistics_, wide_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LossOutput(NamedTuple):
    loss: Tensor
    """Scalar, float32 (float64 for float64 inputs), differentiable in hidden, weight and bias."""
    stats: dict[str, Tensor]
    """Scalars on the device, without gradient: the loss function's statistics and ``entropy_mean``."""


def linear_loss_reference(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    loss_fn: LossFn,
    *,
    per_token: Mapping[str, Tensor],
    token_weight: Tensor,
    cu_seqlens: list[int] | None = None,
    with_entropy: bool = True,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
) -> LossOutput:
    """The definition."""
    logprob_T, entropy_T = linear_logprob_reference(
        hidden_TH,
        weight_VH,
        target_T,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        with_entropy=with_entropy,
        ignore_index=ignore_index,
    )
    tokens = TokenInputs.of(per_token, token_weight.to(logprob_T.dtype), target_T != ignore_index)
    loss, stats = weighted_loss(loss_fn, logprob_T, entropy_T, tokens, _sequence_entries(cu_seqlens, tokens))
    statistics = Statistics()
    statistics.add(stats, tokens)
    return LossOutput(loss, statistics.result())


class ChunkWork(Protocol):
    """What an implementation does with a chunk of rows, before and after the loss function."""

    dtype: torch.dtype
    """Of log-probabilities and loss."""

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies (None if not asked for), 0 in ignored rows."""

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        """Take in the gradients of what ``statistics`` last returned."""

    def totals(self) -> Totals:
        """Of all chunks so far."""

    @staticmethod
    def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """``total`` times a scalar on its device, rounded once to ``dtype``."""


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients exist already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, work: ChunkWork, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*work.totals())
        ctx.scaled = work.scaled
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if total is None else ctx.scaled(total, upstream, dtype)
            for total, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (None, None, *scaled)


def loss_in_chunks(
    work: ChunkWork,
    loss_fn: LossFn,
    tokens: TokenInputs,
    *,
    rows_per_chunk: int,
    cu_seqlens: list[int] | None,
    inputs: tuple[Tensor, Tensor, Tensor | None],
) -> LossOutput:
    """The loss of ``inputs`` (hidden, weight, bias) by ``work``, in chunks of rows or of whole sequences."""
    chunks: Iterable[tuple[slice, list[int] | None]]
    if cu_seqlens is None:
        chunks = ((chunk, None) for chunk in row_chunks(len(inputs[0]), rows_per_chunk))
    else:
        chunks = sequence_chunks(cu_seqlens, rows_per_chunk)
    if not any(Needs.of(*inputs)):
        return _summed(work, loss_fn, tokens, chunks, with_gradients=False)
    loss, stats = _summed(work, loss_fn, tokens, chunks, with_gradients=True)
    return LossOutput(_KnownGradients.apply(loss, work, *inputs), stats)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _summed(
    work: ChunkWork,
    loss_fn: LossFn,
    tokens: TokenInputs,
    chunks: Iterable[tuple[slice, list[int] | None]],
    *,
    with_gradients: bool,
) -> LossOutput:
    loss = torch.zeros((), dtype=work.dtype, device=tokens.weight.device)
    statistics = Statistics()
    for chunk, cu_seqlens in chunks:
        logprob_T, entropy_T = work.statistics(chunk)
        here = tokens.at(chunk)
        extra = _sequence_entries(cu_seqlens, here)
        if with_gradients:
            part, stats, *upstream = loss_and_gradients(loss_fn, logprob_T, entropy_T, here, extra)
            work.add_gradients(*upstream)
        else:
            part, stats = weighted_loss(loss_fn, logprob_T, entropy_T, here, extra)
        loss += part
        statistics.add(stats, here)
    return LossOutput(loss, statistics.result())


class _HeadWork:
    """Plain torch, on any device."""

    def __init__(self, hidden_TH: Tensor, head: LinearHead, needs: Needs, rows: Rows, with_entropy: bool) -> None:
        self.dtype = head.wide
        self._hidden_TH, self._head, self._rows, self._with_entropy = hidden_TH.detach(), head, rows, with_entropy
        self._gradients = HeadGradients(head, needs, len(hidden_TH)) if any(needs) else None
        self._last: tuple[slice, Tensor, Tensor, Tensor | None, RowStatistics] | None = None

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor | None]:
        self._last = None  # room for this chunk
        rows = self._rows.at(chunk)
        known_TH = rows.known(self._hidden_TH[chunk])
        logits_TV = self._head.logits(known_TH)
        slope_TV = None if self._gradients is None else self._head.softcap_slope(logits_TV)
        found = statistics_(logits_TV, rows, with_entropy=self._with_entropy)
        self._last = (chunk, known_TH, logits_TV, slope_TV, found)
        return rows.known_vector(found.logprob), rows.known_vector(found.entropy)

    def add_gradients(self, g_logprob_T: Tensor | None, g_entropy_T: Tensor | None) -> None:
        assert self._last is not None and self._gradients is not None
        chunk, known_TH, exp_TV, slope_TV, found = self._last
        dlogits_TV = gradient_(exp_TV, self._rows.at(chunk), found, g_logprob_T, g_entropy_T)
        self._gradients.add(chunk, dlogits_TV, slope_TV, known_TH)

    def totals(self) -> Totals:
        assert self._gradients is not None
        return self._gradients.totals()

    @staticmethod
    def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))


def linear_loss_chunked(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    loss_fn: LossFn,
    *,
    per_token: Mapping[str, Tensor],
    token_weight: Tensor,
    cu_seqlens: list[int] | None,
    with_entropy: bool,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    memory_budget_bytes: int | None = None,
) -> LossOutput:
    """Plain torch in chunks of rows, or of whole sequences, on any device."""
    head = LinearHead(weight_VH, bias, softcap)
    inputs = (hidden_TH, weight_VH, bias)
    rows = Rows.of(target_T, ignore_index, temperature, logit_scale)
    tokens = TokenInputs.of(per_token, token_weight.to(head.wide), ~rows.is_ignored)
    num_rows = rows_per_chunk(len(hidden_TH), len(weight_VH), head.wide.itemsize, memory_budget_bytes)
    work = _HeadWork(hidden_TH, head, Needs.of(*inputs), rows, with_entropy)
    return loss_in_chunks(work, loss_fn, tokens, rows_per_chunk=num_rows, cu_seqlens=cu_seqlens, inputs=inputs)


def _sequence_entries(cu_seqlens: list[int] | None, tokens: TokenInputs) -> dict[str, Tensor]:
    """What only a sequence-level loss is given."""
    if cu_seqlens is None:
        return {}
    device = tokens.weight.device
    return {"cu_seqlens": torch.tensor(cu_seqlens, device=device), "token_mask": tokens.is_counted}


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: LossFn,
    *,
    per_token: Mapping[str, Tensor],
    token_weight: Tensor,
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
    """``sum_t token_weight[t] * loss_fn(logprob, entropy, per_token)[t]`` without ``[T, V]`` logits.

    A token counts unless its target is ``ignore_index`` or its weight is 0. Others contribute exactly
    nothing, to the loss and to every gradient, whatever they hold, NaN included.

    Args:
        hidden: [T, H]; float32, bfloat16, float16 or float64; any strides.
        weight: [V, H], same dtype. May be the tied embedding.
        targets: [T], int64 or int32 token ids, or ``ignore_index``.
        loss_fn: see ``rlcore.kernels.losses.interface``; a plain PyTorch function of [t] vectors, run chunk
            by chunk (on whole sequences if marked ``@sequence_level``).
        per_token: [T] or [T, ...] tensors that ``loss_fn`` reads, without gradient.
        token_weight: [T], any float dtype; see ``rlcore.ops.token_weights``.
        cu_seqlens: [N + 1] integers from 0 to T; needed by sequence-level losses. Reading it waits for its
            device: a CPU tensor costs nothing.
        with_entropy: compute the entropy; False passes None to ``loss_fn``.
        bias: [V], any float dtype.
        temperature: the sampler's; > 0, a float or [T].
        softcap: > 0; logits become ``softcap * tanh(logits / softcap)`` before the scale and the temperature.
        logit_scale: > 0; multiplies the logits.
        ignore_index: marks targets that do not count.
        group: a process group over which the vocabulary is split.
        memory_budget_bytes: limit for temporaries of the logits; None is ``chunks.DEFAULT_BUDGET_BYTES``. A
            sequence longer than it allows is still taken whole by a sequence-level loss.
        implementation: run this one or raise; None chooses.

    Returns:
        ``(loss, stats)``: a scalar, differentiable in ``hidden``, ``weight`` and ``bias`` and 0 if no token
        counts, and scalars by name. Nothing waits for the device.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above, or a ``loss_fn`` that returns
            them.
        UnsupportedError: no implementation serves, or the one asked for refuses; with the reasons.
    """
    hidden, weight, bias = lowered_as_linear(hidden, weight, bias)
    check_head(hidden, weight, targets, bias=bias, softcap=softcap, logit_scale=logit_scale)
    _check_tokens(hidden, per_token, token_weight)
    token_weight, targets = _counted(token_weight.detach(), targets, ignore_index)
    temperature = checked_temperature(temperature, targets, ignore_index, wide_dtype(weight.dtype))
    targets = checked_targets(targets, len(weight), ignore_index)
    flags = {
        "bias": bias is not None,
        "entropy": with_entropy,
        "softcap": softcap is not None,
        "sequence_level": isinstance(loss_fn, sequence_level),
        "memory_budget": memory_budget_bytes is not None,
        "group": group is not None,
    }
    options = frozenset(name for name, is_used in flags.items() if is_used)
    query = Query(hidden.device.type, hidden.dtype, hidden.shape[1], len(weight), options)
    asked_for = {"group": group, "memory_budget_bytes": memory_budget_bytes}
    with torch.autocast(hidden.device.type, enabled=False):
        result: LossOutput = choose("linear_loss", query, implementation).fn(
            hidden,
            weight,
            targets,
            loss_fn if isinstance(loss_fn, sequence_level) or not is_debugging() else refusing_mixed_tokens(loss_fn),
            per_token=per_token,
            token_weight=token_weight,
            cu_seqlens=_sequence_edges(loss_fn, cu_seqlens, per_token, len(hidden)),
            with_entropy=with_entropy,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            ignore_index=ignore_index,
            **{name: value for name, value in asked_for.items() if value is not None},
        )
    return result


def _check_tokens(hidden: Tensor, per_token: Mapping[str, Tensor], token_weight: Tensor) -> None:
    check_float("token_weight", token_weight)
    if token_weight.shape != hidden.shape[:1]:
        raise InvalidInputError(
            f"token_weight must be [T] = {[len(hidden)]}; got {list(token_weight.shape)}. See rlcore.ops.token_weights"
        )
    for name, values in per_token.items():
        if values.shape[:1] != hidden.shape[:1]:
            raise InvalidInputError(
                f"per_token[{name!r}] must have one entry for each of the {len(hidden)} rows of hidden; "
                f"got {list(values.shape)}. Repeat per-sequence values for each of their tokens"
            )
    named = {f"per_token[{name!r}]": values for name, values in per_token.items()}
    check_same_device("hidden", hidden.device, token_weight=token_weight, **named)
    for name, values in {"token_weight": token_weight, **named}.items():
        check_constant(name, values)


def _counted(weight_T: Tensor, target_T: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Tokens of weight 0 become ignored, and ignored tokens get weight 0."""
    is_counted_T = (target_T != ignore_index) & (weight_T != 0)
    return weight_T.masked_fill(~is_counted_T, 0.0), target_T.masked_fill(~is_counted_T, ignore_index)


def _sequence_edges(
    loss_fn: LossFn, cu_seqlens: Tensor | None, per_token: Mapping[str, Tensor], num_rows: int
) -> list[int] | None:
    if not isinstance(loss_fn, sequence_level):
        return None
    if cu_seqlens is None:
        raise InvalidInputError("a sequence-level loss needs cu_seqlens, the boundaries of the sequences in hidden")
    taken = sorted({"cu_seqlens", "token_mask"} & per_token.keys())
    if taken:
        raise InvalidInputError(f"per_token must not hold {', '.join(taken)}: linear_loss sets them; rename yours")
    edges: list[int] = cu_seqlens.tolist()
    if cu_seqlens.dim() != 1 or not edges or edges[0] != 0 or edges[-1] != num_rows or edges != sorted(edges):
        raise InvalidInputError(f"cu_seqlens must rise from 0 to the {num_rows} rows of hidden; got {edges}")
    return edges
