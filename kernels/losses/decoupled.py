"""Decoupled PPO (AReaL, Fu et al. 2025, arXiv 2505.24298): three policies, for samples that lag behind.

With u = exp(logprob - old_logprob), ratio to the proximal policy that the clip is around, and w =
exp(old_logprob - rollout_logprob), its ratio to the behaviour policy that sampled:

    value = w PPO(u)      w clamped to [weight_low, weight_high], or 0 outside

A token that is left out still counts in the token weights: the denominator is that from before the rejection.
"""

from __future__ import annotations

from typing import Literal

from rlcore.arguments import NUMBER, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.importance import Level, clamped, importance_weighted, kept_within
from rlcore.kernels.losses.interface import LossFn
from rlcore.kernels.losses.policy import ppo_clip

ACTIONS = ("mask", "clamp")


@takes("decoupled_ppo", weight_low=NUMBER, weight_high=NUMBER)
def decoupled_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    weight_low: float = 0.0,
    weight_high: float = 5.0,
    outside: Literal["mask", "clamp"] = "mask",
    level: Level = "token",
) -> LossFn:
    """Return PPO clip around ``old_logprobs`` on samples of ``rollout_logprobs``; it reads ``advantages`` too.

    Args:
        clip_low: as ``ppo_clip``.
        clip_high: as ``ppo_clip``.
        dual_clip: as ``ppo_clip``.
        weight_low: >= 0; the lowest w that is used unchanged.
        weight_high: the highest.
        outside: the treatment of tokens with another w: "mask" leaves them out, "clamp" clamps w.
        level: "sequence" uses the geometric mean of w over the sequence, and is sequence level.

    Statistics: those of ``ppo_clip``, and of ``tis`` named ``decoupled_ppo_...``.
    """
    if outside not in ACTIONS:
        raise InvalidInputError(f"decoupled_ppo: outside must be one of {', '.join(ACTIONS)}; got {outside!r}")
    weigh = (
        kept_within("decoupled_ppo weights", low=weight_low, high=weight_high)
        if outside == "mask"
        else clamped("decoupled_ppo weights", floor=weight_low, cap=weight_high)
    )
    term = ppo_clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return importance_weighted("decoupled_ppo", term, level, weigh)
