"""Terms that keep a policy near a reference, or random.

Estimators of KL(policy || reference) from the policy's own samples (Schulman, "Approximating KL divergence",
2020), with d = ref_logprob - logprob:

    k1 = -d      abs = |d|      k2 = d^2 / 2      k3 = e^d - d - 1 (d clamped to +-20, beyond which no
    gradient flows)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, needed

_LOG_RATIO_LIMIT = 20.0  # beyond e^88 float32 is infinite, and one token would decide the step


def _k3(d: Tensor) -> Tensor:
    return d.expm1() - d


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: _k3(d.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)),
    "abs": lambda d: d.abs(),
}


def kl(*, kind: Literal["k1", "k2", "k3", "abs"] = "k3", coef: float) -> LossFn:
    """``coef`` times an estimate of the divergence from the reference; reads ``ref_logprobs``.

    Statistics: ``kl_mean``, the estimate without ``coef``.
    """
    if kind not in _ESTIMATORS:
        raise InvalidInputError(f"kl: kind must be one of {', '.join(_ESTIMATORS)}; got {kind!r}")
    estimate = _ESTIMATORS[kind]

    def kl_term(
        logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        divergence = estimate(needed(per_token, "ref_logprobs", "kl") - logprob)
        return coef * divergence, {"kl_mean": divergence}

    return kl_term


def entropy_bonus(*, coef: float) -> LossFn:
    """``-coef * entropy``; ``linear_loss`` reports ``entropy_mean``."""

    def entropy_term(
        logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if entropy is None:
            raise InvalidInputError("entropy_bonus needs the entropy; call linear_loss with with_entropy=True")
        return -coef * entropy, {}

    return entropy_term
