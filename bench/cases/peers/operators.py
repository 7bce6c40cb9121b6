"""The same operators as other libraries offer them, called through their public functions.

Each at its defaults, or at the setting its documentation or its own trainer uses for speed. What has no entropy does
less work than ours; its name says so. What is not installed says why when it is run.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import UnsupportedError

Scores = tuple[Tensor, Tensor | None]
"""Log-probability and, where the peer has it, entropy."""
Score = Callable[..., Scores]

_TRL_VOCABULARY_TILE = 32_768
"""As its trainers call it."""


def token_logprob_peers(*, with_gradients: bool) -> dict[str, Score]:
    peers: dict[str, Score] = {
        _named("trl"): _trl_rows,
        f"{_named('flash-attn')}, no entropy": _flash_attention_rows,
        "torch.compile": _compiled_rows,
        "torch eager, float32": _eager_rows,
    }
    return peers if with_gradients else {**peers, f"{_named('liger-kernel')}, no entropy": _liger_rows}


def linear_logprob_peers(*, with_gradients: bool) -> dict[str, Score]:
    return {
        _named("trl"): _trl_linear,
        f"{_named('liger-kernel')}, CuTe, targets unchecked": _liger_cute,
        f"{_named('liger-kernel')}, Triton, no entropy": _liger_triton,
        f"{_named('verl')}, Triton": _verl,
        f"{_named('cut-cross-entropy')}, no entropy": _cut_cross_entropy,
        "torch.compile, bfloat16 logits": _compiled_linear,
    }


def _named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(package, f"{module} cannot be imported: {error}") from error


# ------------------------------------------------------------------------------------------------ from logits


def _trl_rows(logits_TV: Tensor, target_T: Tensor) -> Scores:
    found: Scores = _imported("trl.kernels", "trl").selective_log_softmax_and_entropy(logits_TV, target_T)
    return found


def _liger_rows(logits_TV: Tensor, target_T: Tensor) -> Scores:
    """Scores all rows but the last: it was made for logits that look one token ahead."""
    function = _imported("liger_kernel.ops.grpo_loss", "liger-kernel").fused_selective_log_softmax
    return function(logits_TV.detach()[None], target_T[None, :-1], 1.0)[0], None


def _flash_attention_rows(logits_TV: Tensor, target_T: Tensor) -> Scores:
    """Published as source alone, for a compiler."""
    function = _imported("flash_attn.ops.triton.cross_entropy", "flash-attn").cross_entropy_loss
    return -function(logits_TV, target_T)[0], None


def _eager_rows(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    all_TV = logits_TV.float().log_softmax(-1)
    return all_TV.gather(1, target_T[:, None]).squeeze(1), -(all_TV.exp() * all_TV).sum(1)


def _compiled_rows(logits_TV: Tensor, target_T: Tensor) -> Scores:
    return _compiled()(logits_TV, target_T)


@functools.cache
def _compiled() -> Score:
    """Compile at the first call, as that loads dynamo: who lists the peers does not need it."""
    return torch.compile(_eager_rows)


# ----------------------------------------------------------------------------------------- from hidden states


def _trl_linear(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Scores:
    found = _imported("trl.kernels", "trl").ChunkedLogProbFunction.apply(
        hidden_TH, weight_VH, None, target_T, 1.0, _TRL_VOCABULARY_TILE, None, 1.0, ("entropy",)
    )
    return found[0], found[1]


def _liger_cute(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Scores:
    """Hopper's implementation; without nvidia-cutlass-dsl it raises. Its check of targets waits for the device, and its
    documentation turns it off for speed."""
    _imported("cutlass.cute", "nvidia-cutlass-dsl")
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"
    function = _imported("liger_kernel.ops", "liger-kernel").LigerFusedLinearScaledCrossEntropyFunction
    nll_T, entropy_T = function.apply(hidden_TH, weight_VH, target_T, 1.0, -100, 1, True)
    return -nll_T, entropy_T


def _liger_triton(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Scores:
    module = _imported("liger_kernel.ops.fused_linear_cross_entropy", "liger-kernel")
    found = module.LigerFusedLinearCrossEntropyFunction.apply(
        hidden_TH, weight_VH, target_T, None, None, -100, 0.0, 0.0, "none", None, False, torch.float32
    )
    return -found[0], None


def _verl(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Scores:
    function = _imported("verl.utils.kernel.linear_cross_entropy", "verl").linear_cross_entropy
    logprob_T, entropy_T = function(hidden_TH, weight_VH, target_T, 1.0, "none")
    return logprob_T, entropy_T


def _cut_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Scores:
    function = _imported("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    return -function(hidden_TH, weight_VH, target_T, reduction="none").float(), None


def _compiled_linear(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Scores:
    return _compiled_rows(hidden_TH @ weight_VH.T, target_T)


PEERS = {"token_logprob": token_logprob_peers, "linear_logprob": linear_logprob_peers}
"""For each operator the function that returns its peers by name."""
