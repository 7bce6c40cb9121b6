"""The weight of each token, by which the token losses of a batch become one number.

With m the mask, n_i the number of masked-in tokens of sequence i, N tokens and B sequences in the whole
optimiser step:

    token-mean               m / N                  DAPO (arXiv 2503.14476)
    token-sum                m
    seq-mean-token-sum       m / B
    seq-mean-token-mean      m / (n_i B)            GRPO (2402.03300), GSPO (2507.18071)
    seq-mean-token-sum-norm  m / (L_max B)          Dr. GRPO (2503.20783); L_max a constant of the run

The loss is then ``sum_t weight[t] * value[t]``, and the losses of micro-batches and ranks add up if ``total`` counts
all of them. Sequences in which no token counts do not count either.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.arguments import AT_LEAST_0, WHOLE, Kind, optional, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.cu_seqlens import rising_edges
from rlcore.kernels.operands import TENSOR, check_mask, check_values

Mode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_TOTAL = optional(
    Kind(
        f"{AT_LEAST_0.words}, or a tensor of one",
        lambda value: value.numel() == 1 if TENSOR.has(value) else AT_LEAST_0.has(value),
    )
)


@takes("token_weights", mask=TENSOR, total=_TOTAL, cu_seqlens=optional(TENSOR), max_length=optional(WHOLE))
def token_weights(
    mode: Mode,
    mask: Tensor,
    *,
    total: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Return the weight of each token.

    Args:
        mode: one of the five above.
        mask: [N, L], or packed [T]; nonzero for tokens that count.
        total: N ("token-mean") or B ("seq-mean-...") of the whole optimiser step; None counts this batch.
        cu_seqlens: [N + 1], of a packed mask alone; the "seq-mean-..." modes need it.
        max_length: L_max, needed by "seq-mean-token-sum-norm" alone.

    Returns:
        float32, shape of the mask; 0 outside it, and everywhere if nothing counts.

    Raises:
        InvalidInputError: an unknown mode, an argument that it needs or does not take, a mask that holds NaN, or
            ``cu_seqlens`` that do not rise from 0 to T.
    """
    if mode not in MODES:
        raise InvalidInputError(f"token_weights: mode must be one of {', '.join(MODES)}; got {mode!r}")
    if mask.dim() not in (1, 2):
        raise InvalidInputError(f"token_weights: mask must be [N, L] or packed [T]; got {list(mask.shape)}")
    if mask.dim() == 2 and cu_seqlens is not None:
        raise InvalidInputError(
            f"token_weights: cu_seqlens goes with a packed mask [T], and the rows of mask {list(mask.shape)} are "
            "sequences already; give one of them"
        )
    check_mask("token_weights: mask", mask)
    _check_max_length(mode, max_length)
    weight = (mask != 0).float()
    _check_total(total, weight)
    if mode == "token-sum":
        return weight
    if mode == "token-mean":
        return weight / _at_least_one(weight.sum() if total is None else total)
    length_N, length = _lengths(weight, cu_seqlens)
    weight = weight / _at_least_one((length_N > 0).sum() if total is None else total)
    if mode == "seq-mean-token-mean":
        return weight / length.clamp(min=1)
    return weight / max_length if max_length is not None else weight


def _check_max_length(mode: str, max_length: int | None) -> None:
    is_needed = mode == "seq-mean-token-sum-norm"
    if is_needed and (max_length is None or max_length < 1):
        raise InvalidInputError(
            f"token_weights: {mode!r} needs max_length >= 1, a constant of the run such as the longest "
            f"response allowed (the padded width would change from batch to batch); got {max_length}"
        )
    if not is_needed and max_length is not None:
        raise InvalidInputError(f"token_weights: {mode!r} takes no max_length; got {max_length}")


def _check_total(total: float | Tensor | None, weight: Tensor) -> None:
    """Refuse a ``total`` of 0, no token in the whole step, where this batch has a token that counts."""
    if total is not None and (isinstance(total, Tensor) or total == 0):
        is_possible = (weight == 0).all() | (torch.as_tensor(total, device=weight.device) != 0)
        check_values(is_possible, lambda: "token_weights: total must be above 0 where a token of mask counts; got 0")


def _at_least_one(total: float | Tensor) -> float | Tensor:
    return total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)


def _lengths(weight: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tokens that count in each sequence, [N], and the same number at each token."""
    if weight.dim() == 2:
        length_N1 = weight.sum(1, keepdim=True)
        return length_N1.squeeze(1), length_N1.expand_as(weight)
    if cu_seqlens is None:
        raise InvalidInputError("token_weights: a packed mask needs cu_seqlens to tell sequences apart")
    edge_N = rising_edges("token_weights: cu_seqlens", cu_seqlens.to(weight.device), len(weight))
    running_T = torch.nn.functional.pad(weight.double().cumsum(0), (1, 0))
    length_N = running_T[edge_N].diff().float()
    return length_N, length_N.repeat_interleave(edge_N.diff(), output_size=len(weight))
