"""verl's FSDP2 engines with ``rlcore.Offloader`` behind ``to()``: strategy fsdp2, and VERL_ENGINE_VENDOR=rlcore.

verl itself makes new tensors at each move, in new pinned memory. Here the tensors stay what they are, and their memory
leaves through an arena of host blocks, which is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

import rlcore
from rlcore.errors import InvalidInputError

_DEVICES = ["cuda", "npu", "xpu", "musa"]


class Arena:
    """The weights, optimizer states and gradients of one verl engine, by tag, on the device or in host memory.

    Args:
        engine: whose ``module`` and ``optimizer`` these are, from the first move on.

    Attributes:
        let_go: called before the memory of weights is freed, which others may have open.
    """

    def __init__(self, engine: ArenaOffload) -> None:
        self._engine = engine
        self._offloader: rlcore.Offloader | None = None
        self.let_go: Callable[[], None] | None = None

    @property
    def parts(self) -> rlcore.Offloader:
        if self._offloader is None:
            owners = [owner for owner in (self._engine.module, self._engine.optimizer) if owner is not None]
            self._offloader = rlcore.Offloader(*owners)
        return self._offloader

    def bring(self, *tags: str) -> list[str]:
        """Bring tags to the device; return those that were away."""
        away = [] if self._offloader is None else [tag for tag in tags if self.parts.state.get(tag) == "offloaded"]
        if away:
            self.parts.onload(*away)
        return away

    def send_back(self, tags: list[str]) -> None:
        """Move tags to host memory; [] moves nothing."""
        if "weights" in tags and self.let_go is not None:
            self.let_go()
        if tags:
            self.parts.offload(*tags)

    @contextmanager
    def present(self, *tags: str) -> Iterator[None]:
        away = self.bring(*tags)
        try:
            yield
        finally:
            self.send_back(away)

    def until_read(self, weights: Iterator[Any], away: list[str]) -> Iterator[Any]:
        """Yield verl's weights; send back, at the end, the tags that were away."""
        try:
            yield from weights
        finally:
            self.send_back(away)


class EngineWeights(Iterator[tuple[str, Tensor]]):
    """All weights of an engine: an iteration is verl's own, of whole tensors; ``in_place()`` reads none.

    Args:
        module: whose weights are on the device.
        stream: verl's; its end sends weights back that were away.
        away: the tags that were away.
    """

    def __init__(self, module: nn.Module, arena: Arena, stream: Iterator[tuple[str, Tensor]], away: list[str]) -> None:
        self._module, self._arena, self._stream, self._away = module, arena, stream, away

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._stream)

    @contextmanager
    def in_place(self, let_go: Callable[[], None]) -> Iterator[nn.Module]:
        """Give the module, sharded as it is, in place of an iteration.

        Args:
            let_go: called, now and later, before the memory of weights is freed, which others may have open.
        """
        self._arena.let_go = let_go
        try:
            yield self._module
        finally:
            self._arena.send_back(self._away)


class ArenaOffload:
    """Moves what the verl engine that it is mixed into has through an ``Arena``."""

    module: Any
    optimizer: Any
    engine_config: Any
    _qat_enabled: bool
    _uses_fsdp2_cpu_offload_policy: bool

    @functools.cached_property
    def arena(self) -> Arena:
        return Arena(self)

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        self._is_offload_param = self._is_offload_optimizer = False  # verl moves nothing by its own functions

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload) and not self._uses_fsdp2_cpu_offload_policy

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload) and not self._uses_fsdp2_cpu_offload_policy

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        BaseEngine.to(self, device, model, optimizer, grad)  # checks the combination
        if device not in (get_device_name(), "cpu"):
            raise InvalidInputError(f"a verl engine moves to {get_device_name()!r} or 'cpu', got {device!r}")
        if self.engine_config.forward_only or self._uses_fsdp2_cpu_offload_policy:
            return  # FSDP2 moves them itself
        asked = {"weights": model, "optimizer": optimizer, "grads": grad}
        tags = [tag for tag in self.arena.parts.state if asked[tag]]
        if tags and device == get_device_name():
            self.arena.parts.onload(*tags)
        else:
            self.arena.send_back(tags)

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        with self.arena.present("weights", "optimizer"):
            super().save_checkpoint(*args, **options)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **options: Any) -> None:
        with self.arena.present("weights", "optimizer"):
            super().load_checkpoint(*args, **options)  # type: ignore[misc]

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[Any], Any]:
        """Return ``EngineWeights``, or verl's stream where that is no plain export: adapters, quantized weights."""
        away = self.arena.bring("weights")
        weights, peft_config = super().get_per_tensor_param(**options)  # type: ignore[misc]
        stream = self.arena.until_read(weights, away)
        if peft_config is not None or self._qat_enabled or self._uses_fsdp2_cpu_offload_policy:
            return stream, peft_config
        return EngineWeights(self.module, self.arena, stream, away), None

    def get_per_tensor_param_shard(self, **options: Any) -> tuple[Iterator[Any], Any]:
        away = self.arena.bring("weights")
        shards, peft_config = super().get_per_tensor_param_shard(**options)  # type: ignore[misc]
        return self.arena.until_read(shards, away), peft_config


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=_DEVICES, vendor="rlcore")
class ArenaEngineWithLMHead(ArenaOffload, FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's actor and reference engine."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device=_DEVICES, vendor="rlcore")
class ArenaEngineWithValueHead(ArenaOffload, FSDPEngineWithValueHead):  # type: ignore[misc]
    """verl's critic engine."""
