"""A second instance of a vLLM worker's model on the meta device, without memory, for traces of its loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from rlcore.engines.sampling.replica.meta_tensors import made_on
from rlcore.engines.sampling.vllm.interfaces import VllmConfig


def meta_model(
    vllm_config: VllmConfig, *, is_plain: bool = False
) -> tuple[nn.Module, Callable[[Iterable[tuple[str, Tensor]]], Any]]:
    """Return this worker's shard of the model that ``vllm_config`` describes, and its loader.

    It is to be called in the worker's process, whose tensor and expert parallel ranks it takes. The live model and
    ``vllm_config`` do not change.

    Args:
        is_plain: leave out the quantisation that vLLM does while it loads.
    """
    if is_plain:
        plain: Any = copy.copy(vllm_config)
        plain.quant_config = None
        vllm_config = plain
    model: Any = new_model(vllm_config, "meta")
    return model, model.load_weights


def new_model(vllm_config: VllmConfig, device: str) -> nn.Module:
    """Return another instance of the model on ``device``, with uninitialized weights."""
    from vllm.model_executor.model_loader.utils import initialize_model

    own: VllmConfig = copy.copy(vllm_config)
    own.compilation_config = copy.copy(vllm_config.compilation_config)
    own.compilation_config.static_forward_context = {}  # attention layers register their names there, each once
    with made_on(device, own.model_config.dtype):
        model: nn.Module = initialize_model(vllm_config=own)
    return model
