"""A step of the train engine on meta tensors: the engine's own code, and the memory that it would take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from rlcore._torch_private import own_buffers
from rlcore.device import Device
from rlcore.engines.executors.step import evaluate, score, train_step
from rlcore.engines.executors.strategy import OneDevice
from rlcore.engines.executors.train_options import ScoreOptions, StepOptions
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.engines.rank_batch import SCORED, WEIGHT, rank_batches
from rlcore.kernels.losses.interface import LossFn
from rlcore.nn import TrainModule, optimizers_of
from rlcore.planned import PlannedDevice, planning_for
from rlcore.planning.ledger import Ledger
from rlcore.planning.stand_ins import TRANSIENT, stand_ins
from rlcore.registry import get_device

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Peak:
    """The memory of one phase on one device, in bytes."""

    before: int
    """In tensors when it begins."""
    allocated: int
    """In tensors at most."""
    reserved: int
    """In the allocator's segments at most."""
    parts: dict[str, int]
    """``allocated`` by what it is."""


class _MetaDevice:
    """The host's device, but that its tensors are on the meta device."""

    torch_device = _META

    def __init__(self) -> None:
        self._host = get_device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class TracedTrainer:
    """One rank of a train engine whose tensors have sizes alone.

    Args:
        module: made under ``rlcore.meta_device()``; it is changed.
    """

    def __init__(self, module: TrainModule, sharding: Sharding, device: PlannedDevice) -> None:
        self.module, self._planned = module, device
        self.ledger = Ledger(TRANSIENT)
        module.output_head()  # measured while nothing is traced
        shard(module, sharding, _META, lambda: None, 1)
        self._strategy = OneDevice(module, cast("Device", _MetaDevice()))
        for parameter in module.parameters():
            self.ledger.add(parameter.data, "weights")
        for part in module.modules():
            buffers = own_buffers(part)
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = buffer.to(_META)
                    self.ledger.add(buffers[name], "weights")
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._label_gradient)
        module.train()
        with self._tracing():
            module.on_weights_materialized()
            for optimizer in optimizers_of(module).values():
                _choose_implementation(optimizer)

    def _label_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self.ledger.label(parameter.grad, "gradients")

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        with planning_for(self._planned), stand_ins(), self.ledger:
            yield

    def train(self, packed: dict[str, torch.Tensor], loss_fn: LossFn, options: StepOptions) -> Peak:
        """Return the peak of one optimizer step on a packed batch that has token weights."""
        (batch,) = rank_batches(packed, 1, options.max_tokens_per_micro_batch)
        with self._phase() as peak:
            train_step(self._strategy, batch, loss_fn, options)
        for optimizer in optimizers_of(self.module).values():
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_meta:
                        self.ledger.label(value, "optimizer")
        return peak()

    def evaluate(self, packed: dict[str, torch.Tensor], loss_fn: LossFn, options: StepOptions) -> Peak:
        (batch,) = rank_batches(packed, 1, options.max_tokens_per_micro_batch)
        with self._phase() as peak:
            evaluate(self._strategy, batch, loss_fn, options)
        return peak()

    def score(self, packed: dict[str, torch.Tensor], options: ScoreOptions) -> Peak:
        """Return the peak of scoring a packed batch that says which tokens are scored."""
        (batch,) = rank_batches(packed, 1, options.max_tokens_per_micro_batch)
        with self._phase() as peak:
            score(self._strategy, batch, options)
        return peak()

    @contextmanager
    def _phase(self) -> Iterator[Any]:
        allocator = self.ledger.allocator
        self.ledger.reset_peaks()
        before = allocator.allocated

        def peak() -> Peak:
            parts = {name: size for name, size in self.ledger.at_peak.items() if size}
            return Peak(before, allocator.peak_allocated, allocator.peak_reserved, parts)

        with self._tracing():
            yield peak


def _choose_implementation(optimizer: Any) -> None:
    pass
