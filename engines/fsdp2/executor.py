"""The train executor ``fsdp2``: each worker holds its shards of the user's module, by torch's FSDP2."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rlcore.device import Device
from rlcore.engines.checkpoints import train_state
from rlcore.engines.checkpoints.train_state import Trained, TrainState
from rlcore.engines.executors.base import COLLECTIVE_TIMEOUT_S
from rlcore.engines.executors.base_weights import BaseWeights
from rlcore.engines.executors.deterministic import deterministic_algorithms, prepare_deterministic
from rlcore.engines.executors.materialize import lacking, materialize, read_again
from rlcore.engines.executors.sharded import ShardedExecutor
from rlcore.engines.executors.strategy import OneDevice
from rlcore.engines.fsdp2.optimizers import check_schedulers, check_sharded
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.engines.fsdp2.strategy import Fsdp2Strategy
from rlcore.engines.offload.group import GradientGroup, OffloadGroup, optimizer_tensors
from rlcore.engines.offload.guards import Guard
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.sender import Sender
from rlcore.nn import TrainModule, optimizers_of
from rlcore.rms_norm import use_device_norms
from rlcore.weights.shards import local_part
from rlcore.weights.source import WeightSource, open_weights

_log = logging.getLogger(__name__)
_LARGE = 100_000_000
"""A model of fewer parameters computes in either dtype before the host has said what is next."""


class Fsdp2Executor(ShardedExecutor):
    """One rank: owns its shards of the module on one device."""

    options_class = Sharding

    def build(self, module: TrainModule, seed: int, /, **options: Any) -> bool:
        """Shard and materialize the module; ``options`` are those of ``Sharding``."""
        sharding = Sharding(**options)
        device, context = self.device.torch_device, self.context
        if sharding.deterministic:
            prepare_deterministic()
            self.arithmetic = deterministic_algorithms
        if context.rank == 0 and (warning := float32_warning(module, sharding, self.device)):
            _log.warning("%s", warning)
        module.measure_head()
        source = open_weights(module, sharding.torch_dtype)
        self.class_name = type(module).__name__  # FSDP changes it
        self.frozen_dtype = sharding.torch_dtype
        if sharding.device_norms and not sharding.compile:
            use_device_norms(module, device)  # before FSDP changes the classes
        join_world = partial(context.process_group, COLLECTIVE_TIMEOUT_S)
        group = shard(module, sharding, device, join_world, context.world_size)
        if context.world_size > 1:
            context.close_listeners(COLLECTIVE_TIMEOUT_S)  # of the mesh's groups
        found = materialize(module, source, device, seed=seed)
        self.base = BaseWeights(module, found, local_part)
        module.train()
        module.on_weights_materialized()
        check_schedulers(module)
        self.module, self.strategy = module, OneDevice(module, self.device)
        if context.world_size > 1:
            check_sharded(module)
            reduce_each = sharding.reduce_each_micro_batch
            alike = sharding.tensor_parallel_size
            self.strategy = Fsdp2Strategy(module, self.device, group, num_alike=alike, reduce_each=reduce_each)
        self.sender = Sender(ModuleSourceTensors(module, context.world_size), self.device)
        self.sync_ends = [self.sender]
        self.offload_groups = self._make_offload_groups()
        return bool(optimizers_of(module))

    def _make_offload_groups(self) -> dict[str, OffloadGroup]:
        module = self.module

        def weights() -> Iterator[nn.Parameter]:
            self.strategy.release()
            return module.parameters()

        def guard_weights(guard: Guard, state: str) -> None:
            message = self.away("weights", state)
            guard.guard_module(module, message)
            guard.guard_optimizers(optimizers_of(module).values(), message)

        def guard_optimizers(guard: Guard, state: str) -> None:
            guard.guard_optimizers(optimizers_of(module).values(), self.away("optimizer", state))

        def guard_grads(guard: Guard, state: str) -> None:
            guard.guard_steps(optimizers_of(module).values(), self.away("grads", state))
            if state == "offloaded" and any(parameter.grad is not None for parameter in module.parameters()):
                message = (
                    f"the grads of this {self.class_name} are in host memory, where zero_grad() does not reach them; "
                    "drop them by the engine's meta('grads'), or call its onload('grads') first"
                )
                guard.guard_zero_grad([module, *optimizers_of(module).values()], message)

        return {
            "weights": OffloadGroup(self.device, weights, guard_weights, before_leaving=self.sender.revoke),
            "optimizer": OffloadGroup(
                self.device,
                lambda: optimizer_tensors(optimizers_of(module).values()),
                guard_optimizers,
            ),
            "grads": GradientGroup(self.device, module, guard_grads),
        }

    def own_state(self) -> _ModuleState:
        self.strategy.release()
        return _ModuleState(self.module)

    def prepare_load(self) -> None:
        for group in self.offload_groups.values():
            group.forget()


def float32_warning(module: nn.Module, sharding: Sharding, device: Device) -> str | None:
    """Return a warning where a large model computes in float32 on an accelerator and nobody has asked for it."""
    is_asked = sharding.compute_dtype is not None or sharding.dtype != "float32"
    if is_asked or device.spec.is_host or torch.get_float32_matmul_precision() != "highest":
        return None
    if sum(parameter.numel() for parameter in module.parameters()) < _LARGE:
        return None
    return (
        f"{type(module).__name__} computes in float32 on {device.name}; an H200 takes over ten times as long as in "
        "bfloat16. Build with compute_dtype='bfloat16': the weights that the optimizer steps stay float32. Or say that "
        "you want it so: compute_dtype='float32'"
    )


class _ModuleState:
    """The ``OwnState`` of a module whose parameters and optimizers torch knows."""

    def __init__(self, module: TrainModule) -> None:
        self._module = module

    def trained(self, *, with_values: bool, left_out: Collection[str] = ()) -> Trained:
        return train_state.trained(self._module, left_out)

    def lacking(self, source: WeightSource, names: Sequence[str]) -> list[str]:
        return lacking(self._module, source, names)

    def read_again(self, source: WeightSource, names: Sequence[str]) -> None:
        read_again(self._module, source, names)

    def restore(self, state: TrainState) -> None:
        train_state.restore(state, self._module)
