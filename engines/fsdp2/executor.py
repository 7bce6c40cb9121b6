"""The train executor ``fsdp2``: each worker holds its shards of the user's module, by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.engines.checkpoints import train_state
from rlcore.engines.checkpoints.checkpoint import Checkpoint
from rlcore.engines.checkpoints.export import export
from rlcore.engines.checkpoints.loading import agreed, half_loaded
from rlcore.engines.checkpoints.saving import Saver
from rlcore.engines.executors.base import COLLECTIVE_TIMEOUT_S, TrainExecutor
from rlcore.engines.executors.state import check_state
from rlcore.engines.executors.train_options import LossOptions, ScoreOptions, StepOptions
from rlcore.engines.fsdp2.materialize import materialize, read_again
from rlcore.engines.fsdp2.pieces import own_pieces, read_piece
from rlcore.engines.fsdp2.sharding import Sharding, reshard, shard
from rlcore.engines.fsdp2.step import evaluate, score, train_step
from rlcore.engines.fsdp2.strategy import Fsdp2Strategy
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.group import GradientGroup, OffloadGroup, optimizer_tensors
from rlcore.engines.offload.guards import Guard
from rlcore.engines.rank_batch import RankBatch
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.sender import Sender
from rlcore.errors import UnsupportedError
from rlcore.nn import TrainModule, optimizers_of
from rlcore.rms_norm import use_device_norms
from rlcore.weights.adapters import adapted_layers
from rlcore.weights.source import WeightSource, open_weights
from rlcore.weights.view import Adapters, whole


class Fsdp2Executor(TrainExecutor):
    """One rank: owns its shards of the module on one device."""

    runs_on_many_devices = True
    options_class = Sharding

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._saver = Saver(self.device)

    def build(self, module: TrainModule, seed: int, /, **options: Any) -> bool:
        """Shard and materialize the module; ``options`` are those of ``Sharding``."""
        self._sharding = sharding = Sharding(**options)
        device, context = self.device.torch_device, self.context
        source = open_weights(module, sharding.torch_dtype)
        self._class_name = type(module).__name__  # FSDP changes it
        if sharding.device_norms and not sharding.compile:
            use_device_norms(module, device)  # before FSDP changes the classes
        shard(module, sharding, device, partial(context.process_group, COLLECTIVE_TIMEOUT_S), context.world_size)
        if context.world_size > 1:
            context.close_listeners(COLLECTIVE_TIMEOUT_S)  # of the mesh's groups
        materialize(module, source, device, seed=seed)
        module.train()
        module.on_weights_materialized()
        if context.world_size > 1:
            _check_optimizers(module)
        self.module = module
        self.strategy = Fsdp2Strategy(module, self.device, reduce_each=sharding.reduce_each_micro_batch)
        self._sender = Sender(ModuleSourceTensors(module, context.world_size), self.device)
        self.sync_ends = [self._sender]
        self.offload_groups = self._make_offload_groups()
        return bool(optimizers_of(module))

    def _make_offload_groups(self) -> dict[str, OffloadGroup]:
        module, class_name = self.module, self._class_name

        def weights() -> Iterator[nn.Parameter]:
            reshard(module)
            return module.parameters()

        def guard_weights(guard: Guard, state: str) -> None:
            message = f"the weights of this {class_name} are {state}; call the engine's onload('weights')"
            guard.guard_module(module, message)
            guard.guard_optimizers(optimizers_of(module).values(), message)

        def guard_optimizers(guard: Guard, state: str) -> None:
            message = f"the optimizer of this {class_name} are {state}; call the engine's onload('optimizer')"
            guard.guard_optimizers(optimizers_of(module).values(), message)

        def guard_grads(guard: Guard, state: str) -> None:
            message = f"the grads of this {class_name} are {state}; call the engine's onload('grads')"
            guard.guard_steps(optimizers_of(module).values(), message)
            if state == "offloaded" and any(parameter.grad is not None for parameter in module.parameters()):
                message = (
                    f"the grads of this {class_name} are in host memory, where zero_grad() does not reach them; "
                    "drop them by the engine's meta('grads'), or call its onload('grads') first"
                )
                guard.guard_zero_grad([module, *optimizers_of(module).values()], message)

        return {
            "weights": OffloadGroup(self.device, weights, guard_weights, before_leaving=self._sender.revoke),
            "optimizer": OffloadGroup(
                self.device,
                lambda: optimizer_tensors(optimizers_of(module).values()),
                guard_optimizers,
            ),
            "grads": GradientGroup(self.device, module, guard_grads),
        }

    # ------------------------------------------------------------------------------------------- training

    def train_step(self, batch: RankBatch, loss_fn: Any, options: StepOptions) -> dict[str, float]:
        return train_step(self.module, self.device, batch, loss_fn, options=options, strategy=self.strategy)

    def evaluate(self, batch: RankBatch, loss_fn: Any, options: LossOptions) -> dict[str, float]:
        return evaluate(self.module, self.device, batch, loss_fn, options, strategy=self.strategy)

    def score(self, batch: RankBatch, options: ScoreOptions) -> Tensor:
        return score(self.module, self.device, batch, options, strategy=self.strategy)

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self, adapters: Adapters) -> dict[str, Tensor]:
        weights = self._whole_weights(adapters)
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights if self._answers}

    def _whole_weights(self, adapters: Adapters = "merged") -> Iterator[tuple[str, Tensor]]:
        """Gather one weight after the other: all ranks must take all of them."""
        reshard(self.module)
        for name, tensor in self.module.named_weights(adapters):
            yield name, whole(tensor)

    @property
    def _answers(self) -> bool:
        """True if the user's program takes results of this rank: of rank 0, or under torchrun, of each rank."""
        return self.context.rank == 0 or self.context.joins_torchrun

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        reshard(self.module)
        has_adapters = bool(adapted_layers(self.module))
        own = {weight.name: weight for weight in self.module.weight_views("only" if has_adapters else "base")}
        check_state(self._class_name, own, state, is_adapters=has_adapters)
        for name, weight in own.items():
            for part in weight.parts:
                for box, tensor in own_pieces(part.view, part.parameter):
                    tensor.copy_(read_piece(state[name].__getitem__, part, box))

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path, extra: dict[str, Any], blocking: bool, algorithm: str) -> tuple[str, float]:
        """See ``Saver.save``."""
        reshard(self.module)
        captured = train_state.capture(train_state.trained(self.module), self.device)
        captured = replace(captured, state=captured.state | {"extra": extra})
        return self._saver.save(folder, captured, blocking=blocking, algorithm=algorithm)

    def end_save(self) -> float | None:
        return self._saver.end()

    def is_save_over(self) -> bool:
        return self._saver.is_over()

    def load(self, folder: Path) -> dict[str, Any]:
        reshard(self.module)
        frozen = train_state.unsaved(self.module)

        def look(saved: Checkpoint) -> tuple[train_state.TrainState, WeightSource | None]:
            state = train_state.check(saved, train_state.trained(self.module), self.device)
            return state, open_weights(self.module, self._sharding.torch_dtype) if frozen else None

        state, base = agreed(folder, self.device, look)
        self._sender.revoke()
        self.offload_groups["weights"].forget()
        self.offload_groups["optimizer"].forget()
        try:
            if base is not None:
                read_again(self.module, base, frozen)
            train_state.restore(state, self.module)
        except Exception as error:
            raise half_loaded(folder, error) from error
        return state.plain.extra

    def export(self, folder: Path, max_shard_bytes: int, algorithm: str) -> None:
        reshard(self.module)
        writes = self.context.rank == 0
        export(self.module, folder, max_shard_bytes=max_shard_bytes, writes=writes, algorithm=algorithm)

    def close(self) -> None:
        self._saver.wait()
        super().close()


def _check_optimizers(module: TrainModule) -> None:
    """Refuse optimizers that torch cannot run on sharded parameters: it would, after a backward, name an operator."""
    for name, optimizer in optimizers_of(module).items():
        if isinstance(optimizer, torch.optim.SGD) and any(group["fused"] for group in optimizer.param_groups):
            raise UnsupportedError(
                f"{name} of {type(module).__name__}, an SGD with fused=True, on several workers",
                "torch has no such kernel for sharded parameters; leave fused out",
            )
