"""The critic's loss (Schulman et al. 2017, with the clip of the OpenAI baselines). With v the new value, v_old the
value before the step, R the return:

    value = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2      loss = sum_t weight[t] * value[t]

The gradient is v - R where the first is the larger, else 0 beyond the clip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.evaluate import Statistics, TokenInputs
from rlcore.kernels.losses.interface import LossOutput
from rlcore.kernels.operands import check_constant, check_float, check_positive, check_same_device, check_shape
from rlcore.kernels.softmax_rows import wide_dtype


def value_loss(
    values: Tensor,
    returns: Tensor,
    token_weight: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> LossOutput:
    """Compute half the squared error of a critic, clipped around its old values.

    Args:
        values: [T] or [N, L], any float dtype; with gradient.
        returns: the same shape; see ``gae``.
        token_weight: the same shape; see ``token_weights``. A token of weight 0 contributes exactly nothing,
            whatever it holds.
        old_values: the same shape; the values that ``gae`` was given. Needed if and only if ``clip`` is.
        clip: > 0; how far from its old value a value may profit from moving. None does not clip.

    Returns:
        ``(loss, stats)``: a scalar, float32 (float64 for float64 values), and ``value_mean return_mean
        value_clip_mean``, weighted like the loss.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above.
    """
    if (clip is None) != (old_values is None):
        raise InvalidInputError(
            "value_loss: clip and old_values go together; got "
            f"clip={clip}, old_values {'not given' if old_values is None else 'given'}"
        )
    constants = {"returns": returns, "token_weight": token_weight}
    if clip is not None and old_values is not None:
        check_positive("value_loss: clip", clip)
        constants["old_values"] = old_values
    _check(values, constants)
    wide = wide_dtype(values.dtype)
    weight_T = token_weight.to(wide).reshape(-1)
    is_counted_T = weight_T != 0
    value_T, return_T = (torch.where(is_counted_T, x.reshape(-1), 0.0).to(wide) for x in (values, returns))
    loss_T, is_clipped_T = (value_T - return_T).square() / 2, torch.zeros_like(is_counted_T)
    if clip is not None and old_values is not None:
        old_T = torch.where(is_counted_T, old_values.reshape(-1), 0.0).to(wide)
        clipped_T = (value_T.clamp(old_T - clip, old_T + clip) - return_T).square() / 2
        is_clipped_T = clipped_T > loss_T
        loss_T = torch.where(is_clipped_T, clipped_T, loss_T)
    statistics = Statistics()
    stats = {"value_mean": value_T, "return_mean": return_T, "value_clip_mean": is_clipped_T}
    statistics.add(stats)
    return LossOutput((loss_T * weight_T).sum(), statistics.result(TokenInputs.of({}, weight_T, is_counted_T)))


def _check(values: Tensor, constants: dict[str, Tensor]) -> None:
    for name, tensor in {"values": values, **constants}.items():
        check_float(f"value_loss: {name}", tensor)
        check_shape(f"value_loss: {name}", tensor, tuple(values.shape), "of the shape of values")
    for name, tensor in constants.items():
        check_constant(f"value_loss: {name}", tensor)
    check_same_device("values", values.device, **constants)
