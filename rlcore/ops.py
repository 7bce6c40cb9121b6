"""The operators: log-probabilities, losses, advantages, weights, packing; each imported when first used."""

# ruff: noqa: PLC0414 ("as" says that a name is offered, not merely used)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlcore.torch_import import import_torch

if TYPE_CHECKING:
    from rlcore.kernels.autograd.loss_in_chunks import LossOutput as LossOutput
    from rlcore.kernels.linear.logprob import linear_logprob as linear_logprob
    from rlcore.kernels.linear.loss import linear_loss as linear_loss
    from rlcore.kernels.losses.combine import combine as combine
    from rlcore.kernels.losses.cpgd import cpgd as cpgd
    from rlcore.kernels.losses.decoupled import decoupled_ppo as decoupled_ppo
    from rlcore.kernels.losses.dppo import dppo as dppo
    from rlcore.kernels.losses.gmpo import gmpo as gmpo
    from rlcore.kernels.losses.gspo import gspo as gspo
    from rlcore.kernels.losses.importance import icepop as icepop
    from rlcore.kernels.losses.importance import sequence_mask as sequence_mask
    from rlcore.kernels.losses.importance import tis as tis
    from rlcore.kernels.losses.interface import LossFn as LossFn
    from rlcore.kernels.losses.interface import sequence_level as sequence_level
    from rlcore.kernels.losses.penalty import entropy_bonus as entropy_bonus
    from rlcore.kernels.losses.penalty import kl as kl
    from rlcore.kernels.losses.policy import ppo_clip as ppo_clip
    from rlcore.kernels.losses.reinforce import cispo as cispo
    from rlcore.kernels.losses.reinforce import cispo_absolute as cispo_absolute
    from rlcore.kernels.losses.reinforce import reinforce as reinforce
    from rlcore.kernels.losses.sapo import sapo as sapo
    from rlcore.kernels.losses.sequences import sequence_mean as sequence_mean
    from rlcore.kernels.losses.value import value_loss as value_loss
    from rlcore.kernels.packing import balance as balance
    from rlcore.kernels.packing import inverse_permutation as inverse_permutation
    from rlcore.kernels.packing import pack as pack
    from rlcore.kernels.packing import position_ids as position_ids
    from rlcore.kernels.packing import unpack as unpack
    from rlcore.kernels.returns.group_advantage import group_advantage as group_advantage
    from rlcore.kernels.returns.scan import discounted_return as discounted_return
    from rlcore.kernels.returns.scan import gae as gae
    from rlcore.kernels.returns.scan import masked_whiten as masked_whiten
    from rlcore.kernels.softmax_rows import Logprobs as Logprobs
    from rlcore.kernels.token.logprob import token_logprob as token_logprob
    from rlcore.kernels.token.loss import token_loss as token_loss
    from rlcore.kernels.token.nucleus import keep_mask as keep_mask
    from rlcore.kernels.token.weights import token_weights as token_weights

_HOME = {
    "Logprobs": "rlcore.kernels.softmax_rows",
    "LossFn": "rlcore.kernels.losses.interface",
    "LossOutput": "rlcore.kernels.autograd.loss_in_chunks",
    "balance": "rlcore.kernels.packing",
    "cispo": "rlcore.kernels.losses.reinforce",
    "cispo_absolute": "rlcore.kernels.losses.reinforce",
    "combine": "rlcore.kernels.losses.combine",
    "cpgd": "rlcore.kernels.losses.cpgd",
    "decoupled_ppo": "rlcore.kernels.losses.decoupled",
    "discounted_return": "rlcore.kernels.returns.scan",
    "dppo": "rlcore.kernels.losses.dppo",
    "entropy_bonus": "rlcore.kernels.losses.penalty",
    "gae": "rlcore.kernels.returns.scan",
    "gmpo": "rlcore.kernels.losses.gmpo",
    "group_advantage": "rlcore.kernels.returns.group_advantage",
    "gspo": "rlcore.kernels.losses.gspo",
    "icepop": "rlcore.kernels.losses.importance",
    "inverse_permutation": "rlcore.kernels.packing",
    "keep_mask": "rlcore.kernels.token.nucleus",
    "kl": "rlcore.kernels.losses.penalty",
    "linear_logprob": "rlcore.kernels.linear.logprob",
    "linear_loss": "rlcore.kernels.linear.loss",
    "masked_whiten": "rlcore.kernels.returns.scan",
    "pack": "rlcore.kernels.packing",
    "position_ids": "rlcore.kernels.packing",
    "ppo_clip": "rlcore.kernels.losses.policy",
    "reinforce": "rlcore.kernels.losses.reinforce",
    "sapo": "rlcore.kernels.losses.sapo",
    "sequence_level": "rlcore.kernels.losses.interface",
    "sequence_mask": "rlcore.kernels.losses.importance",
    "sequence_mean": "rlcore.kernels.losses.sequences",
    "tis": "rlcore.kernels.losses.importance",
    "token_logprob": "rlcore.kernels.token.logprob",
    "token_loss": "rlcore.kernels.token.loss",
    "token_weights": "rlcore.kernels.token.weights",
    "unpack": "rlcore.kernels.packing",
    "value_loss": "rlcore.kernels.losses.value",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlcore.ops' has no attribute {name!r}; it offers {', '.join(__all__)}")
    import_torch()
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
