"""A second instance of a vLLM worker's model on the meta device, for ``engines.sync.recording``: it has no memory.

Tensors of whole numbers, such as the map from experts to those of this worker, are real: loaders read them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlcore.engines.sampling.vllm.interfaces import Config

_FACTORIES = {torch.arange, torch.empty, torch.full, torch.ones, torch.tensor, torch.zeros}


def meta_model(vllm_config: Config) -> tuple[nn.Module, Callable[[Iterable[tuple[str, Tensor]]], Any]]:
    """The model that ``vllm_config`` describes, as this worker's share of it is laid out, and its loader.

    Call it in the worker's process, whose place among the tensor and expert parallel ranks it has. The live model and
    ``vllm_config`` are left as they are.
    """
    model: Any = new_model(vllm_config, "meta")
    return model, model.load_weights


def new_model(vllm_config: Config, device: str) -> nn.Module:
    """Another instance of the model, with weights of no certain value on ``device``."""
    from vllm.model_executor.model_loader.utils import initialize_model

    own: Config = copy.copy(vllm_config)
    own.compilation_config = copy.copy(vllm_config.compilation_config)
    own.compilation_config.static_forward_context = {}  # attention layers enter their names, each once
    before = torch.get_default_dtype()
    torch.set_default_dtype(own.model_config.dtype)
    try:
        with torch.device(device), _WholeNumbersAreReal():
            model: nn.Module = initialize_model(vllm_config=own)
            return model
    finally:
        torch.set_default_dtype(before)


class _WholeNumbersAreReal(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and kwargs.get("device") is None and _makes_whole_numbers(func, args, kwargs):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _makes_whole_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func is torch.arange and all(isinstance(bound, int) for bound in args)
    return not (dtype.is_floating_point or dtype.is_complex)
