"""Weights of a TRL trainer into the vLLM that it runs in its own process, by rlcore's plan and not tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

import rlcore
from rlcore.engines.sampling.vllm.reload_check import check_reload
from rlcore.engines.sampling.vllm.target import VllmTarget
from rlcore.registry import get_device

_WRAPPERS = ("_checkpoint_wrapped_module.", "base_model.model.", ".base_layer", "modules_to_save.default.")
"""Parts of a parameter's name that activation checkpointing and PEFT put in, and that no checkpoint has."""


class PlannedSync:
    """Replaces ``VLLMGeneration.sync_weights`` of the mode "colocate".

    Args:
        generation: TRL's; its vLLM has the weights of the model's folder, or sleeps.
    """

    def __init__(self, generation: Any) -> None:
        self._generation = generation
        self._sender: rlcore.WeightSender | None = None

    def __call__(self) -> None:
        """Wake vLLM's weights, where they sleep, and give it the trainer's.

        Raises:
            SyncError: what went wrong, and whether vLLM's weights are whole.
        """
        generation, llm = self._generation, self._generation.llm
        if generation.enable_sleep_mode:
            get_device(generation.accelerator.device).memory.empty_cache()  # room for what wakes
            llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False
        with merged(generation.model):
            self._connected().send()
        llm.reset_prefix_cache()

    def _connected(self) -> rlcore.WeightSender:
        if self._sender is None:
            target = _target(self._generation)
            if target.device.spec.is_host:
                check_reload(target)
            model = self._generation.model
            self._sender = rlcore.WeightSender(lambda: named_weights(model), rlcore.WeightReceiver(target))
        return self._sender


def named_weights(model: Any) -> dict[str, Tensor]:
    """Return the parameters by their names in checkpoints; those of adapters, which are merged, are left out."""
    adapters = getattr(model, "prefix", None) if hasattr(model, "merge_adapter") else None
    found = {}
    for name, parameter in model.named_parameters():
        if "original_module" in name or (adapters and adapters in name):
            continue
        found[functools.reduce(lambda shorter, part: shorter.replace(part, ""), _WRAPPERS, name)] = parameter
    return found


@contextlib.contextmanager
def merged(model: Any) -> Iterator[None]:
    """Have the adapters in the base weights meanwhile."""
    if not hasattr(model, "merge_adapter"):
        yield
        return
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


def _target(generation: Any) -> VllmTarget:
    engine = generation.llm.llm_engine
    model = engine.model_executor.driver_worker.model_runner.model
    return VllmTarget(model, engine.vllm_config, get_device(str(generation.accelerator.device)))
