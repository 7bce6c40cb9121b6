"""Tinker's losses: a sum over the tokens, of the log-probs of the targets and of what a datum gives.

Formulas: https://tinker-docs.thinkingmachines.ai/losses. Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlcore.arguments import did_you_mean
from rlcore.errors import InvalidInputError, UnsupportedError

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def cross_entropy(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -logprob_T * inputs["weights"]


def importance_sampling(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(logprob_T - inputs["logprobs"]).exp() * inputs["advantages"]


def ppo(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_T = (logprob_T - inputs["logprobs"]).exp()
    clipped_T = _clipped(ratio_T, config)
    return -torch.minimum(ratio_T * inputs["advantages"], clipped_T * inputs["advantages"])


def cispo(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_T = (logprob_T - inputs["logprobs"]).exp()
    return -_clipped(ratio_T, config).detach() * logprob_T * inputs["advantages"]


def dro(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    distance_T = (logprob_T - inputs["logprobs"]).square()
    return -(logprob_T * inputs["advantages"] - 0.5 * config.get("beta", 0.05) * distance_T)


def _clipped(ratio_T: Tensor, config: Config) -> Tensor:
    return ratio_T.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))


LOSSES: dict[str, Callable[[Tensor, Inputs, Config], Tensor]] = {
    one.__name__: one for one in (cross_entropy, importance_sampling, ppo, cispo, dro)
}
READS = {name: ("weights",) if name == "cross_entropy" else ("logprobs", "advantages") for name in LOSSES}
"""A datum must have these for a loss, besides its target tokens."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}


def check_loss(name: str, config: Config) -> None:
    """Raise for a loss that is not there, or options that it does not have."""
    if name in {"gspo", "stable_reinforce"}:
        raise UnsupportedError(
            f"loss_fn={name!r}", "its formula is not among those of the documentation; use forward_backward_custom()"
        )
    if name not in LOSSES:
        hint = did_you_mean(name, LOSSES)
        raise InvalidInputError(f"unknown loss_fn {name!r}{hint or ';'} accepted: {', '.join(LOSSES)}")
    if unknown := sorted(set(config) - set(OPTIONS.get(name, ()))):
        accepted = ", ".join(OPTIONS.get(name, ())) or "none"
        raise InvalidInputError(f"loss_fn_config of {name!r} has no {unknown[0]!r}; accepted: {accepted}")
