"""The same operators as other libraries offer them, called through their public functions, where they are installed.

Each at its defaults, or at the setting its own trainer uses. What has no entropy does less work than ours; its name
says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import version

from torch import Tensor

LogprobFromLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(logits, targets) -> (logprob, entropy)"""
LogprobFromHidden = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(hidden, weight, targets) -> (logprob, entropy)"""

_TRL_VOCABULARY_TILE = 32_768
"""As its trainers call it."""


def token_logprob_peers() -> dict[str, LogprobFromLogits]:
    found: dict[str, LogprobFromLogits] = {}
    if _is_installed("trl"):
        from trl.kernels import selective_log_softmax_and_entropy

        found[f"trl {version('trl')}"] = selective_log_softmax_and_entropy
    return found


def linear_logprob_peers() -> dict[str, LogprobFromHidden]:
    found: dict[str, LogprobFromHidden] = {}
    if _is_installed("trl"):
        found[f"trl {version('trl')}"] = _trl
    if _is_installed("cut_cross_entropy"):
        found[f"cut-cross-entropy {version('cut-cross-entropy')}, no entropy"] = _cut_cross_entropy
    return found


def _trl(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    from trl.kernels import ChunkedLogProbFunction

    found = ChunkedLogProbFunction.apply(
        hidden_TH, weight_VH, None, target_T, 1.0, _TRL_VOCABULARY_TILE, None, 1.0, ("entropy",)
    )
    return found[0], found[1]


def _cut_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, None]:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden_TH, weight_VH, target_T, reduction="none").float(), None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
