"""The train executor ``deepspeed``: a real DeepSpeed engine with ZeRO 1, 2 or 3 over the user's module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlcore.engines.checkpoints import train_state
from rlcore.engines.checkpoints.checkpoint import Checkpoint
from rlcore.engines.checkpoints.export import export
from rlcore.engines.checkpoints.loading import agreed, half_loaded
from rlcore.engines.checkpoints.saving import Saver
from rlcore.engines.deepspeed.fill import fill
from rlcore.engines.deepspeed.library import check_installed, deepspeed_for
from rlcore.engines.deepspeed.memory import ZeroGradients, optimizer_tensors
from rlcore.engines.deepspeed.options import ZeroOptions
from rlcore.engines.deepspeed.partitions import Partitions, chunks
from rlcore.engines.deepspeed.train_state import ZeroTrainState
from rlcore.engines.deepspeed.zero import Zero, check_kind
from rlcore.engines.executors.base import COLLECTIVE_TIMEOUT_S, TrainExecutor
from rlcore.engines.executors.state import check_state
from rlcore.engines.executors.strategy import ShardingStrategy
from rlcore.engines.executors.train_options import LossOptions, ScoreOptions, StepOptions
from rlcore.engines.fsdp2.materialize import materialize
from rlcore.engines.fsdp2.sharding import retype
from rlcore.engines.fsdp2.step import evaluate, score, train_step
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.offload.guards import Guard
from rlcore.engines.rank_batch import RankBatch
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.sender import Sender
from rlcore.errors import StateError, UnsupportedError
from rlcore.nn import TrainModule, optimizers_of
from rlcore.weights.adapters import adapted_layers
from rlcore.weights.source import WeightSource, open_weights
from rlcore.weights.view import Adapters, named_tensors, whole


class DeepSpeedExecutor(TrainExecutor):
    """One rank: owns its partitions of the module on one device."""

    runs_on_many_devices = True
    owns_process = True
    joins_torchrun = True
    options_class = ZeroOptions

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.zero: Zero | None = None
        self._saver = Saver(self.device)

    @classmethod
    def check_packages(cls) -> None:
        check_installed()

    def build(self, module: TrainModule, seed: int, /, **options: Any) -> bool:
        """Partition and materialize the module; ``options`` are those of ``ZeroOptions``."""
        chosen = ZeroOptions(**options)
        self.module, self._class_name = module, type(module).__name__
        device, dtype = self.device.torch_device, chosen.torch_compute_dtype
        self._dtype = dtype
        library = deepspeed_for(self.device)
        self.context.process_group(COLLECTIVE_TIMEOUT_S)
        library.init_distributed(self.device.collectives.backend, dist_init_required=False)
        source = open_weights(module, dtype)
        retype(module, dtype, dtype)
        config = chosen.deepspeed_config(sum(one.numel() for one in module.parameters()))
        self._partitions = partitions = Partitions(library, config if chosen.stage == 3 else None, device)
        materialize(module, source, device, seed=seed, placed=partitions.place)
        module.train()
        module.on_weights_materialized()
        optimizer = checked_optimizer(module)
        partitions.hide_shapes(module)
        self.zero = Zero(library, module, optimizer, chosen, self.device)
        if self.context.world_size > 1:
            self.context.close_listeners(COLLECTIVE_TIMEOUT_S)  # of DeepSpeed's groups
        tensors = ModuleSourceTensors(
            module,
            self.context.world_size,
            views=lambda: partitions.weight_views(module),
            release=self.zero.release,
        )
        self._sender = Sender(tensors, self.device)
        self.sync_ends = [self._sender]
        self.offload_groups = self._make_offload_groups(self.zero)
        return optimizer is not None

    def _make_offload_groups(self, zero: Zero) -> dict[str, OffloadGroup]:
        module, name = self.module, self._class_name

        def weights() -> Iterator[Tensor]:
            zero.release()
            return chunks(module)

        def guard_weights(guard: Guard, state: str) -> None:
            message = f"the weights of this {name} are {state}; call the engine's onload('weights')"
            guard.guard_module(zero.root, message)
            guard.guard_optimizers(zero.optimizers, message)
            _guard_steps(guard, zero, message)

        def guard_optimizer(guard: Guard, state: str) -> None:
            message = f"the optimizer of this {name} are {state}; call the engine's onload('optimizer')"
            guard.guard_optimizers(zero.optimizers, message)
            _guard_steps(guard, zero, message)

        def guard_grads(guard: Guard, state: str) -> None:
            message = f"the grads of this {name} are {state}; call the engine's onload('grads')"
            guard.guard_method(zero, "check_gradients", message)
            _guard_steps(guard, zero, message)

        return {
            "weights": OffloadGroup(self.device, weights, guard_weights, before_leaving=self._sender.revoke),
            "optimizer": OffloadGroup(self.device, lambda: optimizer_tensors(zero), guard_optimizer),
            "grads": ZeroGradients(self.device, zero, guard_grads),
        }

    # ------------------------------------------------------------------------------------------- training

    @property
    def strategy(self) -> ShardingStrategy:
        assert self.zero is not None
        return self.zero

    def train_step(self, batch: RankBatch, loss_fn: Any, options: StepOptions) -> dict[str, float]:
        assert self.zero is not None
        self.zero.adopt_optimizer()
        return train_step(self.module, self.device, batch, loss_fn, options=options, strategy=self.zero)

    def evaluate(self, batch: RankBatch, loss_fn: Any, options: LossOptions) -> dict[str, float]:
        return evaluate(self.module, self.device, batch, loss_fn, options, strategy=self.zero)

    def score(self, batch: RankBatch, options: ScoreOptions) -> Tensor:
        return score(self.module, self.device, batch, options, strategy=self.zero)

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self, adapters: Adapters) -> dict[str, Tensor]:
        weights = ((name, whole(tensor)) for name, tensor in self._named_weights(adapters))
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights if self._answers}

    def _named_weights(self, adapters: Adapters = "merged") -> Iterator[tuple[str, Tensor]]:
        assert self.zero is not None
        self.zero.release()
        return named_tensors(self._partitions.weight_views(self.module, adapters))

    @property
    def _answers(self) -> bool:
        """True if the user's program takes results of this rank: of rank 0, or under torchrun, of each rank."""
        return self.context.rank == 0 or self.context.joins_torchrun

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        assert self.zero is not None
        self.zero.release()
        if self.zero.optimizer is not None and self.offload_groups["optimizer"].is_away:
            raise StateError(
                f"load_state_dict() of this {self._class_name} writes the optimizer's float32 weights, too; "
                "call the engine's onload('optimizer') first"
            )
        adapters: Adapters = "only" if adapted_layers(self.module) else "base"
        own = {weight.name: weight for weight in self._partitions.weight_views(self.module, adapters)}
        check_state(self._class_name, own, state, is_adapters=adapters == "only")
        for name, weight in own.items():
            for part in weight.parts:
                fill(part, state[name])
        self.zero.refresh_masters()

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path, extra: dict[str, Any], blocking: bool, algorithm: str) -> tuple[str, float]:
        """See ``Saver.save``."""
        captured = train_state.capture(self._state().trained(with_values=True), self.device)
        captured = replace(captured, state=captured.state | {"extra": extra})
        return self._saver.save(folder, captured, blocking=blocking, algorithm=algorithm)

    def end_save(self) -> float | None:
        return self._saver.end()

    def is_save_over(self) -> bool:
        return self._saver.is_over()

    def _state(self) -> ZeroTrainState:
        assert self.zero is not None
        self.zero.adopt_optimizer()
        self.zero.release()
        return ZeroTrainState(self.zero, self.module, self._partitions, self._class_name)

    def load(self, folder: Path) -> dict[str, Any]:
        own, frozen = self._state(), train_state.unsaved(self.module)

        def look(saved: Checkpoint) -> tuple[train_state.TrainState, WeightSource | None]:
            state = train_state.check(saved, own.trained(with_values=False), self.device)
            return state, open_weights(self.module, self._dtype) if frozen else None

        state, base = agreed(folder, self.device, look)
        self._sender.revoke()
        for tag in ("weights", "optimizer"):
            self.offload_groups[tag].onload()  # all tensors are filled in place
        try:
            if base is not None:
                self._partitions.read_again(self.module, base, frozen)
            own.restore(state)
        except Exception as error:
            raise half_loaded(folder, error) from error
        return state.plain.extra

    def export(self, folder: Path, max_shard_bytes: int, algorithm: str) -> None:
        assert self.zero is not None
        self.zero.release()
        export(
            self.module,
            folder,
            max_shard_bytes=max_shard_bytes,
            writes=self.context.rank == 0,
            algorithm=algorithm,
            views=lambda: self._partitions.weight_views(self.module),
        )

    def close(self) -> None:
        self._saver.wait()
        zero = self.zero
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
