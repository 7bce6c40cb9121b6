"""The operators: log-probabilities, losses, advantages, weights, packing; each imported when first used."""

# ruff: noqa: PLC0414 ("as" says that a name is offered, not merely used)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.kernels.advantages import group_advantage as group_advantage
    from rlcore.kernels.linear_logprob import linear_logprob as linear_logprob
    from rlcore.kernels.linear_loss import LossOutput as LossOutput
    from rlcore.kernels.linear_loss import linear_loss as linear_loss
    from rlcore.kernels.losses.combine import combine as combine
    from rlcore.kernels.losses.interface import LossFn as LossFn
    from rlcore.kernels.losses.interface import sequence_level as sequence_level
    from rlcore.kernels.losses.penalty import entropy_bonus as entropy_bonus
    from rlcore.kernels.losses.penalty import kl as kl
    from rlcore.kernels.losses.policy import ppo_clip as ppo_clip
    from rlcore.kernels.nucleus import keep_mask as keep_mask
    from rlcore.kernels.packing import balance as balance
    from rlcore.kernels.packing import inverse_permutation as inverse_permutation
    from rlcore.kernels.packing import pack as pack
    from rlcore.kernels.packing import position_ids as position_ids
    from rlcore.kernels.packing import unpack as unpack
    from rlcore.kernels.rows import Logprobs as Logprobs
    from rlcore.kernels.token_logprob import token_logprob as token_logprob
    from rlcore.kernels.token_weights import token_weights as token_weights

_HOME = {
    "Logprobs": "rlcore.kernels.rows",
    "LossFn": "rlcore.kernels.losses.interface",
    "LossOutput": "rlcore.kernels.linear_loss",
    "balance": "rlcore.kernels.packing",
    "combine": "rlcore.kernels.losses.combine",
    "entropy_bonus": "rlcore.kernels.losses.penalty",
    "group_advantage": "rlcore.kernels.advantages",
    "inverse_permutation": "rlcore.kernels.packing",
    "keep_mask": "rlcore.kernels.nucleus",
    "kl": "rlcore.kernels.losses.penalty",
    "linear_logprob": "rlcore.kernels.linear_logprob",
    "linear_loss": "rlcore.kernels.linear_loss",
    "pack": "rlcore.kernels.packing",
    "position_ids": "rlcore.kernels.packing",
    "ppo_clip": "rlcore.kernels.losses.policy",
    "sequence_level": "rlcore.kernels.losses.interface",
    "token_logprob": "rlcore.kernels.token_logprob",
    "token_weights": "rlcore.kernels.token_weights",
    "unpack": "rlcore.kernels.packing",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlcore.ops' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
