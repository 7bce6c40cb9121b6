"""The base of train executors that lay a module over the ranks by a ``ShardingStrategy``: steps, state, checkpoints."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlcore.engines.checkpoints import train_state
from rlcore.engines.checkpoints.checkpoint import Checkpoint
from rlcore.engines.checkpoints.export import export
from rlcore.engines.checkpoints.loading import agreed, half_loaded
from rlcore.engines.checkpoints.saving import Saver
from rlcore.engines.checkpoints.train_state import Trained, TrainState
from rlcore.engines.executors.base import TrainExecutor
from rlcore.engines.executors.base_weights import BaseWeights
from rlcore.engines.executors.pieces import fill
from rlcore.engines.executors.state import check_state
from rlcore.engines.executors.step import evaluate, score, train_step
from rlcore.engines.executors.strategy import ShardingStrategy
from rlcore.engines.executors.train_options import LossOptions, ScoreOptions, StepOptions
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.rank_batch import RankBatch
from rlcore.engines.weight_sync.sender import Sender
from rlcore.kernels.losses.interface import LossFn
from rlcore.weights.adapters import adapted_layers
from rlcore.weights.source import WeightSource, open_weights
from rlcore.weights.view import Adapters, WeightView, named_tensors, whole

_log = logging.getLogger(__name__)


class OwnState(Protocol):
    """The state of a module that checkpoints hold, as this rank has it."""

    def trained(self, *, with_values: bool, left_out: Collection[str] = ()) -> Trained:
        """Return the state without these weights. All ranks call it together.

        Without values it can only be compared with a checkpoint.
        """

    def lacking(self, source: WeightSource, names: Sequence[str]) -> list[str]:
        """Return the names of the parameters that the source does not have, or not all of."""

    def read_again(self, source: WeightSource, names: Sequence[str]) -> None:
        """Overwrite parameters by their values in the source, which has them."""

    def restore(self, state: TrainState) -> None:
        """Put a checked state back; tensors are filled in place."""


class ShardedExecutor(TrainExecutor):
    """One rank: owns its part of the module on one device. ``build`` of a subclass sets the attributes below."""

    runs_on_many_devices = True
    strategy: ShardingStrategy
    frozen_dtype: torch.dtype
    """The dtype in which weights that no checkpoint has are read again."""
    base: BaseWeights | None = None
    """The weights that checkpoints leave to the module's source; None saves all of them."""
    class_name: str
    """The class of the user's module, before anything has changed it."""
    sender: Sender
    arithmetic: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context of each step, evaluation and scoring."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._saver = Saver(self.device)

    @abstractmethod
    def own_state(self) -> OwnState:
        """Return the state of the module, of which nothing is gathered any more."""

    @abstractmethod
    def prepare_load(self) -> None:
        """Ready the offload groups for tensors that a checkpoint fills."""

    def weight_views(self, adapters: Adapters = "merged") -> Iterable[WeightView]:
        """Return the weights with the parameters as they are sharded."""
        return self.module.weight_views(adapters)

    def away(self, tag: str, state: str) -> str:
        """Return the error of a use of this tag while it is away."""
        return f"the {tag} of this {self.class_name} are {state}; call the engine's onload({tag!r})"

    # ------------------------------------------------------------------------------------------- training

    def train_step(self, batch: RankBatch, loss_fn: LossFn, options: StepOptions) -> dict[str, float]:
        with self.arithmetic():
            return train_step(self.strategy, batch, loss_fn, options)

    def evaluate(self, batch: RankBatch, loss_fn: LossFn, options: LossOptions) -> dict[str, float]:
        with self.arithmetic():
            return evaluate(self.strategy, batch, loss_fn, options)

    def score(self, batch: RankBatch, options: ScoreOptions) -> Tensor:
        with self.arithmetic():
            return score(self.strategy, batch, options)

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self, adapters: Adapters) -> dict[str, Tensor]:
        self.strategy.release()
        # one weight after the other is gathered: all ranks take all of them
        weights = ((name, whole(tensor)) for name, tensor in named_tensors(self.weight_views(adapters)))
        answers = self.context.rank == 0 or self.context.joins_torchrun
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights if answers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.strategy.release()
        adapters: Adapters = "only" if adapted_layers(self.module) else "base"
        own = {weight.name: weight for weight in self.weight_views(adapters)}
        check_state(self.class_name, own, state, is_adapters=adapters == "only")
        for name, weight in own.items():
            for part in weight.parts:
                fill(part, state[name])

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path, extra: dict[str, object], blocking: bool, algorithm: str) -> tuple[str, float]:
        """See ``Saver.save``."""
        own = self.own_state()
        left_out = self.base.unchanged(self.device) if self.base is not None else ()
        captured = train_state.capture(own.trained(with_values=True, left_out=left_out), self.device)
        captured = replace(captured, state=captured.state | {"extra": extra})
        return self._saver.save(folder, captured, blocking=blocking, algorithm=algorithm)

    def end_save(self) -> float | None:
        return self._saver.end()

    def is_save_over(self) -> bool:
        return self._saver.is_over()

    def load(self, folder: Path) -> dict[str, object]:
        own, base_names = self.own_state(), train_state.base_names(self.module)

        def look(saved: Checkpoint) -> tuple[TrainState, WeightSource | None]:
            state = train_state.check(saved, own.trained(with_values=False), self.device, base_names)
            if not state.left_out:
                return state, None
            source = open_weights(self.module, self.frozen_dtype)
            if missing := own.lacking(source, state.left_out):
                state = train_state.without_source(state, missing, self.class_name)
            return state, source

        state, source = agreed(folder, self.device, look)
        self.sender.revoke()
        self.prepare_load()
        try:
            if source is not None:
                own.read_again(source, state.left_out)
            own.restore(state)
        except Exception as error:
            raise half_loaded(folder, error) from error
        for warning in state.warnings:
            _log.warning(warning)
        return state.plain.extra

    def export(self, folder: Path, max_shard_bytes: int, algorithm: str) -> None:
        self.strategy.release()
        export(
            self.module,
            folder,
            max_shard_bytes=max_shard_bytes,
            writes=self.context.rank == 0,
            algorithm=algorithm,
            views=self.weight_views,
        )

    def close(self) -> None:
        self._saver.wait()
        super().close()
