"""The operators: log-probabilities, losses, advantages, weights, packing; each imported when first used."""

# ruff: noqa: PLC0414 ("as" says that a name is offered, not merely used)
from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.torch_import import import_torch

if TYPE_CHECKING:
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
    from rlcore.kernels.losses.interface import LossOutput as LossOutput
    from rlcore.kernels.losses.interface import sequence_level as sequence_level
    from rlcore.kernels.losses.off_policy import opsm as opsm
    from rlcore.kernels.losses.on_policy import on_policy as on_policy
    from rlcore.kernels.losses.penalty import entropy_bonus as entropy_bonus
    from rlcore.kernels.losses.penalty import kl as kl
    from rlcore.kernels.losses.policy import ppo_clip as ppo_clip
    from rlcore.kernels.losses.reinforce import cispo as cispo
    from rlcore.kernels.losses.reinforce import cispo_absolute as cispo_absolute
    from rlcore.kernels.losses.reinforce import reinforce as reinforce
    from rlcore.kernels.losses.sapo import sapo as sapo
    from rlcore.kernels.losses.sequences import sequence_mean as sequence_mean
    from rlcore.kernels.losses.token_weights import token_weights as token_weights
    from rlcore.kernels.losses.value import value_loss as value_loss
    from rlcore.kernels.losses.vespo import vespo as vespo
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

_IMPORT = re.compile(r"^    from (rlcore\.\S+) import (\w+) as \2$", re.MULTILINE)
_MODULES = {name: module for module, name in _IMPORT.findall(Path(__file__).read_text("utf-8"))}
"""The module of each name, read from the imports above, which only type checkers run: each name is stated once."""

__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rlcore.ops' has no attribute {name!r}; it offers {', '.join(__all__)}")
    import_torch()
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
