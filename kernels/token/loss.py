"""Any loss of log-probabilities that the caller has computed already.

    loss = sum_t token_weight[t] * value[t]      value, stats = loss_fn(logprob, entropy, per_token)

It is plain PyTorch, so that ``torch.compile`` makes one graph of it. The forward then reads the loss function's inputs
once and writes only sums; the backward reads them once more and writes the two gradients.

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlcore.arguments import LIST, optional, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.cu_seqlens import rising_edges
from rlcore.kernels.losses.evaluate import SequenceStatistics, TokenInputs, check_tokens, loss_of_tokens
from rlcore.kernels.losses.interface import LOSS, LossFn, LossOutput, PerToken, checked_edges, sequence_level
from rlcore.kernels.operands import TENSOR, TENSORS, check_float, check_no_nan, check_same_device, check_shape
from rlcore.kernels.softmax_rows import wide_dtype


@takes(
    "token_loss", logprob=TENSOR, loss_fn=LOSS, per_token=TENSORS, token_weight=TENSOR, stats_weight=optional(TENSOR),
    sequence_stats=LIST, entropy=optional(TENSOR), cu_seqlens=optional(TENSOR),
)  # fmt: skip
def token_loss(
    logprob: Tensor,
    loss_fn: LossFn,
    *,
    per_token: PerToken,
    token_weight: Tensor,
    stats_weight: Tensor | None = None,
    sequence_stats: Sequence[str] = (),
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> LossOutput:
    """Compute the loss of ``linear_loss`` from log-probabilities, such as those of ``token_logprob``.

    A token of weight 0 contributes exactly nothing, to the loss and to every gradient, whatever it holds, NaN included.

    Args:
        logprob: [T], any float dtype; with gradient.
        loss_fn: see ``rlcore.kernels.losses.interface``.
        per_token: [T] or [T, ...] tensors that ``loss_fn`` reads, without gradient.
        token_weight: [T], any float dtype; see ``rlcore.ops.token_weights``.
        stats_weight: [T], numbers >= 0 or bool, by which ``_mean`` statistics are averaged over the tokens that count;
            None is ``token_weight``. The mask of tokens gives plain means over tokens, as peers report them.
        sequence_stats: names of ``_mean`` statistics, such as "clip_low_mean", of which the plain mean over each
            sequence's tokens that count is taken, too; reported are its mean, minimum and maximum over the sequences:
            ``clip_low_sequence_mean``, ``clip_low_sequence_min``, ``clip_low_sequence_max``. It needs ``cu_seqlens``.
        entropy: [T], any float dtype; with gradient. None passes None to ``loss_fn``.
        cu_seqlens: [N + 1] integers from 0 to T; needed by sequence-level losses and ``sequence_stats``.

    Returns:
        ``(loss, stats)``: a scalar, float32 (float64 for float64 log-probabilities), differentiable in ``logprob`` and
        ``entropy``, and scalars by name. Nothing waits for the device.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above, or a ``loss_fn`` that returns them.
    """
    check_float("logprob", logprob)
    if logprob.dim() != 1:
        raise InvalidInputError(
            f"logprob must be [T]; got {list(logprob.shape)}. Flatten it, and all that goes with it"
        )
    check_tokens("logprob", logprob, per_token, token_weight, stats_weight)
    if entropy is not None:
        check_float("entropy", entropy)
        check_shape("entropy", entropy, tuple(logprob.shape), "one value for each entry of logprob")
        check_same_device("logprob", logprob.device, entropy=entropy)
    wide = wide_dtype(logprob.dtype)
    weight_T = token_weight.detach().to(wide)
    if not torch.compiler.is_compiling():
        check_no_nan("token_weight", weight_T)
    sequences = SequenceStatistics.of(sequence_stats, cu_seqlens, logprob, "logprob")
    tokens = TokenInputs.of(per_token, weight_T, weight_T != 0, stats_weight, sequences)

    def counted(values_T: Tensor) -> Tensor:
        return torch.where(tokens.is_counted, values_T, 0.0).to(wide)

    extra: Mapping[str, Tensor] = {}
    if isinstance(loss_fn, sequence_level):
        edges = _rising(checked_edges(cu_seqlens, per_token, "token_loss", "logprob"), logprob)
        extra = {"cu_seqlens": edges, "token_mask": tokens.is_counted.clone()}
    entropy_T = None if entropy is None else counted(entropy)
    return loss_of_tokens(loss_fn, counted(logprob), entropy_T, tokens, extra)


def _rising(cu_seqlens: Tensor, logprob_T: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        rising_edges("cu_seqlens", cu_seqlens, len(logprob_T))
    return cu_seqlens.to(logprob_T.device, torch.int64, non_blocking=True, copy=True)  # loss functions may write to it
