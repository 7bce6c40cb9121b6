"""The train executor: what one worker does with the user's module. One worker needs no sharding."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.engines import checkpoint, train_state
from rlcore.engines.executors.worker import Worker
from rlcore.engines.export import replace_folder
from rlcore.engines.named_tensors import mismatch
from rlcore.engines.offload.guards import Guard
from rlcore.engines.offload.resident import GradResident, Resident, optimizer_tensors
from rlcore.engines.sync.local import copy_pairs, pair_weights
from rlcore.engines.train_step import ScoreOptions, StepOptions, score, train_step
from rlcore.errors import InvalidInputError
from rlcore.nn import TrainModule

_MASTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Fsdp2Worker(Worker):
    """Owns the module on one device."""

    module: TrainModule

    def build(self, module: TrainModule, *, dtype: str = "float32") -> bool:
        """Materialize the module; True if it has an optimizer. ``dtype`` is that of the parameters."""
        if dtype not in _MASTER_DTYPES:
            raise InvalidInputError(f"dtype must be one of {', '.join(_MASTER_DTYPES)}, got {dtype!r}")
        module.materialize(self.device.torch_device, _MASTER_DTYPES[dtype])
        module.train()
        module.on_weights_materialized()
        self.module = module
        self._residents = self._make_residents()
        return bool(train_state.optimizers_of(module))

    def _make_residents(self) -> dict[str, Resident]:
        module = self.module

        def guard_weights(guard: Guard, state: str) -> None:
            message = f"the weights of this {type(module).__name__} are {state}; call the engine's onload('weights')"
            guard.guard_module(module, message)
            guard.guard_optimizers(train_state.optimizers_of(module).values(), message)

        def guard_optimizers(tag: str) -> Any:
            def guard_them(guard: Guard, state: str) -> None:
                message = f"the {tag} of this {type(module).__name__} are {state}; call the engine's onload({tag!r})"
                guard.guard_optimizers(train_state.optimizers_of(module).values(), message)

            return guard_them

        return {
            "weights": Resident(self.device, module.parameters, guard_weights),
            "optimizer": Resident(
                self.device,
                lambda: optimizer_tensors(train_state.optimizers_of(module).values()),
                guard_optimizers("optimizer"),
            ),
            "grads": GradResident(self.device, module, guard_optimizers("grads")),
        }

    # ------------------------------------------------------------------------------------------- training

    def train_step(
        self, packed: Mapping[str, Tensor], weight_T: Tensor, loss_fn: Any, options: StepOptions
    ) -> dict[str, float]:
        return train_step(self.module, self.device.torch_device, packed, weight_T, loss_fn, options=options)

    def score(self, packed: Mapping[str, Tensor], scored_T: Tensor, options: ScoreOptions) -> Tensor:
        return score(self.module, self.device.torch_device, packed, scored_T, options)

    # -------------------------------------------------------------------------------------- route "local"

    def check_weights_for(self, target: Any) -> None:
        """Raise SyncError unless ``target.module`` takes these weights."""
        pair_weights(self.module.named_weights(), target.module)

    def copy_weights_to(self, target: Any) -> int:
        """Bytes written into ``target.module``."""
        copied = copy_pairs(pair_weights(self.module.named_weights(), target.module))
        self.device.synchronize()
        return copied

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.module.named_weights()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = dict(self.module.named_weights())
        if found := mismatch(own, state):
            raise InvalidInputError(f"load_state_dict() needs exactly what state_dict() gives: {found}")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path, extra: dict[str, Any]) -> float:
        """Seconds it took."""
        started = time.perf_counter()
        captured = train_state.capture(self.module, self.device)
        checkpoint.write(folder, captured.tensors, captured.state | {"extra": extra})
        return time.perf_counter() - started

    def load(self, folder: Path) -> dict[str, Any]:
        """The ``extra`` that was saved."""
        saved = checkpoint.read(folder)
        train_state.check(saved, self.module)
        self._residents["weights"].forget()
        self._residents["optimizer"].forget()
        train_state.restore(saved, self.module, self.device)
        extra: dict[str, Any] = saved.state["extra"]
        return extra

    def export(self, folder: Path) -> None:
        replace_folder(folder, self.module.export)
