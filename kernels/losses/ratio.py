"""The ratio of a policy to the one before it, d = logprob - old_logprob and r = e^d, and its statistics.

d is clamped to +-20, beyond which no gradient flows: e^20 is far outside any clip range, and beyond e^88 the
gradient of a clipped token would be 0 * inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import PerToken, needed

LOG_RATIO_LIMIT = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    # The clamp whose backward is one kernel; that of Tensor.clamp is five.
    return torch.nn.functional.hardtanh(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio_to_old(logprob: Tensor, per_token: PerToken, loss: str) -> Tensor:
    return bounded(logprob - needed(per_token, "old_logprobs", loss))


def ratio_statistics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return ``ratio_mean ratio_min ratio_max`` and ``approx_kl_mean``, r - 1 - ln r, an estimate of KL(old || new)."""
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    return {"ratio_mean": ratio, "ratio_min": ratio, "ratio_max": ratio, "approx_kl_mean": ratio - 1 - log_ratio}


def stopped_statistics(is_low: Tensor, is_high: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    """Return ``clip_low_mean clip_high_mean``: the share of tokens that the lower and the upper bound stopped.

    A bound stops a token that is beyond it and whose advantage would move it further.
    """
    return {"clip_low_mean": (advantage < 0) & is_low, "clip_high_mean": (advantage > 0) & is_high}


def check_clip(loss: str, clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise InvalidInputError(f"{loss}: clip_low must be in [0, 1]; got {clip_low}")
    if not clip_high >= 0:
        raise InvalidInputError(f"{loss}: clip_high must be >= 0; got {clip_high}")
