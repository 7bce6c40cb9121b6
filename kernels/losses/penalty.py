"""Penalty terms: the KL divergence from a reference, and the entropy.

Estimators of KL(policy || reference) from the policy's own samples (Schulman, "Approximating KL divergence",
2020), with d = ref_logprob - logprob:

    kind   value            gradient with respect to logprob
    k1     -d               1
    abs    |d|              sign(-d)
    k2     d^2 / 2          -d
    k3     e^d - d - 1      1 - e^d
    k1+    that of k1       that of k2 (straight-through, as in verl)
    k3+    that of k3       that of k2
    r*k3   r (e^d - d - 1)  -r d, with r = exp(logprob - old_logprob): unbiased for samples of the old policy
                            (DeepSeek-V3.2; TRL's use_bias_correction_kl)

d under an exponential, and ln r, are clamped to +-20, beyond which no gradient flows. The gradient of k2 is that of
the divergence; k1's has the mean 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from rlcore.arguments import NUMBER, TEXT, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed
from rlcore.kernels.losses.ratio import bounded, log_ratio_to_old
from rlcore.kernels.operands import check_finite

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "r*k3"]


def _k1(d: Tensor) -> Tensor:
    return -d


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    d = bounded(d)  # beyond e^88 float32 is infinite, and one token would decide the step
    return d.expm1() - d


def _straight_through(value: Tensor, slope: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``slope``."""
    return value.detach() + (slope - slope.detach())


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": lambda d: d.abs(),
    "k1+": lambda d: _straight_through(_k1(d), _k2(d)),
    "k3+": lambda d: _straight_through(_k3(d), _k2(d)),
    "r*k3": _k3,
}


@takes("kl", kind=TEXT, coef=NUMBER)
def kl(*, kind: KLKind = "k3", coef: float) -> LossFn:
    """Return ``coef`` times an estimate of the divergence from the reference.

    It reads ``ref_logprobs``, and "r*k3" reads ``old_logprobs`` too.

    Statistics: ``kl_mean``, the estimate without ``coef``.
    """
    if kind not in _ESTIMATORS:
        raise InvalidInputError(f"kl: kind must be one of {', '.join(_ESTIMATORS)}; got {kind!r}")
    check_finite("kl: coef", coef)
    estimate = _ESTIMATORS[kind]

    def kl_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        divergence = estimate(needed(per_token, "ref_logprobs", "kl") - logprob)
        if kind == "r*k3":
            divergence = log_ratio_to_old(logprob, per_token, "kl with kind='r*k3'").exp() * divergence
        return coef * divergence, {"kl_mean": divergence}

    return kl_term


@takes("entropy_bonus", coef=NUMBER)
def entropy_bonus(*, coef: float) -> LossFn:
    """Return ``-coef * entropy``; the operator reports ``entropy_mean``."""
    check_finite("entropy_bonus: coef", coef)

    def entropy_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        if entropy is None:
            raise InvalidInputError(
                "entropy_bonus needs the entropy: linear_loss has it by with_entropy=True, token_loss by entropy="
            )
        return -coef * entropy, {}

    return entropy_term
