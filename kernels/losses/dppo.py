"""DPPO (arXiv 2602.04879): it bounds the distance that a token's probability moved, not the ratio.

With p and q the new and old probability of the token, and all other tokens taken as one outcome:

    tv   |p - q|
    kl   q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))

A token whose advantage would drive it further beyond the bound is left out; for the others, with r = p / q and no
gradient through min:

    value = -A min(r, max_ratio) logprob
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from rlcore.arguments import NUMBER, TEXT, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, needed
from rlcore.kernels.losses.ratio import bounded, log_ratio_to_old, ratio_statistics
from rlcore.kernels.operands import check_positive

_LEAST = 1e-8  # of 1 - p, as in verl: a token of probability 1 has no finite divergence


def _total_variation(logprob: Tensor, old: Tensor) -> Tensor:
    return (logprob.exp() - old.exp()).abs()


def _binary_kl(logprob: Tensor, old: Tensor) -> Tensor:
    rest, old_rest = (-logprob.expm1()).clamp(min=_LEAST), (-old.expm1()).clamp(min=_LEAST)
    return old.exp() * bounded(old - logprob) + old_rest * (old_rest.log() - rest.log())


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"tv": _total_variation, "kl": _binary_kl}


@takes("dppo", kind=TEXT, delta_low=NUMBER, delta_high=NUMBER, max_ratio=NUMBER)
def dppo(
    *,
    kind: Literal["tv", "kl"] = "tv",
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    max_ratio: float = 20.0,
) -> LossFn:
    """Return the policy gradient within a trust region; it reads ``old_logprobs`` and ``advantages``.

    The paper anchors the region at the sampler, so ``old_logprobs`` should be the sampler's.

    Args:
        kind: see above.
        delta_low: >= 0; how far a negative advantage may push a probability down.
        delta_high: >= 0; how far a positive one may push it up.
        max_ratio: > 0; bound of the weight.

    Statistics: ``ratio_mean ratio_min ratio_max approx_kl_mean clip_low_mean clip_high_mean`` as ``ppo_clip``, and
    ``divergence_mean divergence_max``.
    """
    if kind not in _DIVERGENCES:
        raise InvalidInputError(f"dppo: kind must be one of {', '.join(_DIVERGENCES)}; got {kind!r}")
    for name, delta in (("delta_low", delta_low), ("delta_high", delta_high)):
        if not delta >= 0:
            raise InvalidInputError(f"dppo: {name} must be >= 0; got {delta}")
    check_positive("dppo: max_ratio", max_ratio)

    def dppo_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        advantage, old = needed(per_token, "advantages", "dppo"), needed(per_token, "old_logprobs", "dppo")
        log_ratio = log_ratio_to_old(logprob, per_token, "dppo").detach()
        divergence = _DIVERGENCES[kind](logprob.detach(), old)
        is_stopped_high = (advantage > 0) & (log_ratio > 0) & (divergence > delta_high)
        is_stopped_low = (advantage < 0) & (log_ratio < 0) & (divergence > delta_low)
        weight = log_ratio.exp().clamp(max=max_ratio) * advantage
        stats = {
            "clip_low_mean": is_stopped_low,
            "clip_high_mean": is_stopped_high,
            "divergence_mean": divergence,
            "divergence_max": divergence,
        }
        value = (-weight * logprob).where(~(is_stopped_high | is_stopped_low), 0.0)
        return value, ratio_statistics(log_ratio) | stats

    return dppo_term
