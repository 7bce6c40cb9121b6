"""The train executor ``deepspeed``: a real DeepSpeed engine with ZeRO 1, 2 or 3 over the user's module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlcore.engines.deepspeed.library import check_installed, deepspeed_for
from rlcore.engines.deepspeed.memory import ZeroGradients, optimizer_tensors
from rlcore.engines.deepspeed.options import ZeroOptions
from rlcore.engines.deepspeed.partitions import Partitions, chunks
from rlcore.engines.deepspeed.train_state import ZeroTrainState
from rlcore.engines.deepspeed.zero import Zero, check_kind
from rlcore.engines.executors.base import COLLECTIVE_TIMEOUT_S
from rlcore.engines.executors.base_weights import BaseWeights
from rlcore.engines.executors.materialize import materialize, retype
from rlcore.engines.executors.sharded import ShardedExecutor
from rlcore.engines.executors.train_options import StepOptions
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.offload.guards import Guard
from rlcore.engines.rank_batch import RankBatch
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.sender import Sender
from rlcore.errors import StateError, UnsupportedError
from rlcore.kernels.losses.interface import LossFn
from rlcore.nn import TrainModule, optimizers_of
from rlcore.weights.shards import local_part
from rlcore.weights.source import open_weights
from rlcore.weights.view import Adapters, WeightView


class DeepSpeedExecutor(ShardedExecutor):
    """One rank: owns its partitions of the module on one device."""

    owns_process = True
    joins_torchrun = True
    options_class = ZeroOptions
    strategy: Zero

    @classmethod
    def check_packages(cls) -> None:
        check_installed()

    def build(self, module: TrainModule, seed: int, /, **options: Any) -> bool:
        """Partition and materialize the module; ``options`` are those of ``ZeroOptions``."""
        chosen = ZeroOptions(**options)
        self.module, self.class_name = module, type(module).__name__
        device, dtype = self.device.torch_device, chosen.torch_compute_dtype
        self.frozen_dtype = dtype
        library = deepspeed_for(self.device)
        self.context.process_group(COLLECTIVE_TIMEOUT_S)
        library.init_distributed(self.device.collectives.backend, dist_init_required=False)
        module.measure_head()
        source = open_weights(module, dtype)
        retype(module, dtype, dtype)
        config = chosen.deepspeed_config(sum(one.numel() for one in module.parameters()))
        self._partitions = partitions = Partitions(library, config if chosen.stage == 3 else None, device)
        found = materialize(module, source, device, seed=seed, placed=partitions.place)
        self.base = BaseWeights(module, found, lambda parameter: local_part(partitions.flat(parameter)))
        module.train()
        module.on_weights_materialized()
        optimizer = checked_optimizer(module)
        partitions.hide_shapes(module)
        self.strategy = Zero(library, module, optimizer, chosen, self.device)
        if self.context.world_size > 1:
            self.context.close_listeners(COLLECTIVE_TIMEOUT_S)  # of DeepSpeed's groups
        tensors = ModuleSourceTensors(
            module,
            self.context.world_size,
            views=self.weight_views,
            release=self.strategy.release,
        )
        self.sender = Sender(tensors, self.device)
        self.sync_ends = [self.sender]
        self.offload_groups = self._make_offload_groups()
        return optimizer is not None

    def _make_offload_groups(self) -> dict[str, OffloadGroup]:
        module, zero = self.module, self.strategy

        def weights() -> Iterator[Tensor]:
            zero.release()
            return chunks(module)

        def guard_weights(guard: Guard, state: str) -> None:
            message = self.away("weights", state)
            guard.guard_module(zero.root, message)
            guard.guard_optimizers(zero.optimizers, message)
            _guard_steps(guard, zero, message)

        def guard_optimizer(guard: Guard, state: str) -> None:
            message = self.away("optimizer", state)
            guard.guard_optimizers(zero.optimizers, message)
            _guard_steps(guard, zero, message)

        def guard_grads(guard: Guard, state: str) -> None:
            message = self.away("grads", state)
            guard.guard_method(zero, "check_gradients", message)
            _guard_steps(guard, zero, message)

        return {
            "weights": OffloadGroup(self.device, weights, guard_weights, before_leaving=self.sender.revoke),
            "optimizer": OffloadGroup(self.device, lambda: optimizer_tensors(zero), guard_optimizer),
            "grads": ZeroGradients(self.device, zero, guard_grads),
        }

    def weight_views(self, adapters: Adapters = "merged") -> Iterator[WeightView]:
        return self._partitions.weight_views(self.module, adapters)

    def train_step(self, batch: RankBatch, loss_fn: LossFn, options: StepOptions) -> dict[str, float]:
        self.strategy.adopt_optimizer()
        return super().train_step(batch, loss_fn, options)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.strategy.optimizer is not None and self.offload_groups["optimizer"].is_away:
            raise StateError(
                f"load_state_dict() of this {self.class_name} writes the optimizer's float32 weights, too; "
                "call the engine's onload('optimizer') first"
            )
        super().load_state_dict(state)
        self.strategy.refresh_masters()

    def own_state(self) -> ZeroTrainState:
        self.strategy.adopt_optimizer()
        self.strategy.release()
        return ZeroTrainState(self.strategy, self.module, self._partitions, self.class_name)

    def prepare_load(self) -> None:
        for tag in ("weights", "optimizer"):
            self.offload_groups[tag].onload()  # all tensors are filled in place

    def close(self) -> None:
        zero: Zero | None = vars(self).get("strategy")  # a build that failed has none
        super().close()
        if zero is not None:
            zero.close()


def _guard_steps(guard: Guard, zero: Zero, message: str) -> None:
    """Refuse the steps of the user's methods before ZeRO exchanges gradients."""
    for optimizer in zero.optimizers:
        guard.guard_method(optimizer, "step", message)


def checked_optimizer(module: TrainModule) -> Optimizer | None:
    """Return the module's optimizer, None without one.

    Raises:
        UnsupportedError: it has several, or one that ZeRO cannot shard.
    """
    found, name = optimizers_of(module), type(module).__name__
    if len(found) > 1:
        raise UnsupportedError(
            f"the optimizers {', '.join(found)} of {name}",
            "DeepSpeed shards one; use one with parameter groups, or executor='fsdp2'",
        )
    if not found:
        return None
    (optimizer,) = found.values()
    check_kind(optimizer, name)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in held]
    if left_out:
        raise UnsupportedError(
            f"{len(left_out)} parameters of {name} that no optimizer has, the first of them {left_out[0]},",
            "ZeRO shards what an optimizer has; call requires_grad_(False) on them, or give them to the optimizer",
        )
    return optimizer
