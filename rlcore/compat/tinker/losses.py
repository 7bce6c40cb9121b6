"""Tinker's losses: a sum over the tokens, of the log-probs of the targets and of what a datum gives.

Formulas: https://tinker-docs.thinkingmachines.ai/losses. Letters: T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlcore.arguments import NUMBER, did_you_mean, plain_number
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.losses.ratio import bounded

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def cross_entropy(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -logprob_T * inputs["weights"]


def importance_sampling(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -_ratio(logprob_T, inputs) * inputs["advantages"]


def ppo(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_T = _ratio(logprob_T, inputs)
    clipped_T = _clipped(ratio_T, config)
    return -torch.minimum(ratio_T * inputs["advantages"], clipped_T * inputs["advantages"])


def cispo(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_T = _ratio(logprob_T, inputs)
    return -_clipped(ratio_T, config).detach() * logprob_T * inputs["advantages"]


def dro(logprob_T: Tensor, inputs: Inputs, config: Config) -> Tensor:
    distance_T = (logprob_T - inputs["logprobs"]).square()
    return -(logprob_T * inputs["advantages"] - 0.5 * config["beta"] * distance_T)


def _ratio(logprob_T: Tensor, inputs: Inputs) -> Tensor:
    """Return the ratio of the policies, bounded: beyond e^88 the gradient of a token without weight would be NaN."""
    return bounded(logprob_T - inputs["logprobs"]).exp()


def _clipped(ratio_T: Tensor, config: Config) -> Tensor:
    return ratio_T.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


LOSSES: dict[str, Callable[[Tensor, Inputs, Config], Tensor]] = {
    one.__name__: one for one in (cross_entropy, importance_sampling, ppo, cispo, dro)
}
READS = {name: ("weights",) if name == "cross_entropy" else ("logprobs", "advantages") for name in LOSSES}
"""A datum must have these for a loss, besides its target tokens."""
DEFAULTS: dict[str, Config] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
"""The options of a loss. CISPO's ratio is only capped, as its paper says (https://arxiv.org/abs/2506.13585)."""


def whole_config(name: str, config: Config) -> Config:
    """Return the options of a loss with its defaults.

    Raises:
        InvalidInputError, UnsupportedError: the loss is not there, or does not have an option.
    """
    if name in {"gspo", "stable_reinforce"}:
        raise UnsupportedError(
            f"loss_fn={name!r}", "its formula is not among those of the documentation; use forward_backward_custom()"
        )
    if name not in LOSSES:
        hint = did_you_mean(name, LOSSES)
        raise InvalidInputError(f"unknown loss_fn {name!r}{hint or ';'} accepted: {', '.join(LOSSES)}")
    defaults = DEFAULTS.get(name, {})
    if unknown := sorted(set(config) - set(defaults)):
        accepted = ", ".join(defaults) or "none"
        raise InvalidInputError(f"loss_fn_config of {name!r} has no {unknown[0]!r}; accepted: {accepted}")
    plain = {option: plain_number(value) for option, value in config.items()}
    for option, value in plain.items():
        if not NUMBER.has(value) or math.isnan(value):
            raise InvalidInputError(f"loss_fn_config[{option!r}] of {name!r} must be a number, got {value!r:.100}")
    return {**defaults, **plain}
