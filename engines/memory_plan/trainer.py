"""A step of the train engine on meta tensors: the engine's own code, and the memory that it would take.

Nothing is computed and nothing is read: a module of any size is planned on any machine, in seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlcore._torch_private import own_buffers
from rlcore.device import Device
from rlcore.engines.batch import LAYOUT, loss_mask_of, to_packed
from rlcore.engines.executors.step import score, train_step
from rlcore.engines.executors.strategy import OneDevice
from rlcore.engines.executors.train_options import ScoreOptions, StepOptions
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.engines.memory_plan.allocator import Allocator, CachingAllocator, PlainAllocator
from rlcore.engines.memory_plan.inside import INSIDE
from rlcore.engines.memory_plan.ledger import Ledger
from rlcore.engines.memory_plan.ranks import FirstOfGroup
from rlcore.engines.memory_plan.stand_ins import FLOPS, stand_ins
from rlcore.engines.offload.group import optimizer_tensors
from rlcore.engines.rank_batch import SCORED, WEIGHT, RankBatch, rank_batches
from rlcore.kernels.losses.interface import LossFn
from rlcore.kernels.losses.token_weights import token_weights
from rlcore.nn import TrainModule, optimizers_of
from rlcore.planned import PlannedDevice, planning_for
from rlcore.registry import get_device

_META = torch.device("meta")
_LARGE_WORKSPACE_ARCH, _WORKSPACE, _OLDER_WORKSPACE = 90, 32 << 20, (8 << 20) + (128 << 10)
_FILE_BYTES = 2
"""The bytes of a value in most files of weights; ``SourceReader.read`` copies them to the device as they are."""
Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The memory of one phase on one device, in bytes."""

    before: int
    """In tensors when the phase begins."""
    allocated: int
    """In tensors at most."""
    reserved: int
    """In segments of the allocator at most."""
    parts: Mapping[str, int]
    """``allocated`` by what it is."""
    flops: int = 0
    """Floating-point operations of products and attention."""


def workspaces(device: PlannedDevice) -> list[int]:
    """Return what the library of products takes once: a workspace for the handle of the thread that calls,
    and one for that of autograd's thread.

    Its size is torch's: see ``parseChosenWorkspaceSize`` of ``aten/src/ATen/cuda/CublasHandlePool.cpp``.
    """
    if not device.arch:
        return []
    return [_WORKSPACE if device.arch >= _LARGE_WORKSPACE_ARCH else _OLDER_WORKSPACE] * 2


class _MetaDevice:
    """The host's device, but that its tensors are on the meta device."""

    torch_device = _META

    def __init__(self) -> None:
        self._host = get_device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class _NamingSums(OneDevice):
    """Names the gradients that are made of others, in another dtype."""

    def __init__(self, *args: Any, named: Callable[[Tensor], None]) -> None:
        super().__init__(*args)
        self._named = named

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        super().backward(loss, is_last=is_last)
        self._name_all()

    def step(self, max_norm: float | None, seen: Callable[[Tensor], None]) -> None:
        self.sums.narrow()
        self._name_all()
        super().step(max_norm, seen)

    def _name_all(self) -> None:
        for parameter in self.module.parameters():
            self._named(parameter)


class PlannedTrainer:
    """One rank of a train engine, alone with its module, whose tensors have sizes and no memory.

    With ``sequence_parallel_size`` it is the first of the ranks that share each row, and computes its part of it.

    Args:
        module: made under ``rlcore.meta_device()``; a copy of it is planned.
        capacity: the most that the allocator may take from the device; None is no limit.

    Raises:
        PlannedMemoryError: the device has less; also from every method below.
        UnsupportedError: the step needs values of tensors.
    """

    def __init__(
        self, module: TrainModule, sharding: Sharding, device: PlannedDevice, capacity: int | None = None
    ) -> None:
        module.output_head()  # measured while nothing is planned, and once for all copies
        module = copy.deepcopy(module)
        allocator: Allocator = CachingAllocator(capacity) if device.arch else PlainAllocator(capacity)
        self.module, self.device = module, device
        self.ledger = Ledger(allocator, INSIDE, FLOPS)
        vocab_size = len(module.output_head().weight)
        self.ledger.name_of = lambda tensor: "logits" if vocab_size in tensor.shape else "activations"
        shard(module, sharding, _META, lambda: None, 1)
        self._sequences = sharding.sequence_parallel_size
        group = FirstOfGroup(self._sequences) if self._sequences > 1 else None
        if group is not None:
            module.share_sequences(group)
        self._strategy = _NamingSums(module, cast("Device", _MetaDevice()), group, named=self._name_gradient)
        self._hold_module()
        self._workspaces = [torch.empty(size, dtype=torch.uint8, device=_META) for size in workspaces(device)]
        for workspace in self._workspaces:
            self.ledger.add(workspace, "workspaces of libraries")
        module.train()
        with self._running():
            module.on_weights_materialized()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with planning_for(self.device, self.ledger.apart), stand_ins(self.device), self.ledger:
            yield

    def _hold_module(self) -> None:
        for parameter in self.module.parameters():
            self.ledger.add(parameter.detach(), "weights")
            if self.device.arch:
                self.ledger.take_inside([parameter.numel() * _FILE_BYTES])
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._name_gradient)  # type: ignore[no-untyped-call]
        for part in self.module.modules():
            buffers = own_buffers(part)
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = planned = buffer.to(_META)
                    self.ledger.add(planned, "buffers")

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.rename(parameter.grad, "gradients")

    # ----------------------------------------------------------------------------------------------- state

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def make_optimizer_state(self) -> None:
        """Take an optimizer step without a batch, after which the optimizers have their states."""
        self.make_gradients()
        with self._running():
            for optimizer in optimizers_of(self.module).values():
                optimizer.step()
            self._strategy.zero()
        self._name_optimizer_state()

    def _name_optimizer_state(self) -> None:
        for optimizer in optimizers_of(self.module).values():
            for value in optimizer_tensors([optimizer]):
                self.ledger.rename(value, "optimizer")

    def make_gradients(self) -> None:
        """Let every trained parameter have a gradient, as after the first of several micro-batches."""
        with self._running():
            for parameter in self._trained:
                parameter.grad = torch.empty_like(parameter)
                self._name_gradient(parameter)

    @property
    def scalar_bytes(self) -> int:
        """Return the bytes of the numbers in the states of optimizers, such as counts of steps, which nothing cuts."""
        states = optimizer_tensors(optimizers_of(self.module).values())
        return sum(value.nbytes for value in states if not value.dim())

    def held(self) -> dict[str, int]:
        """Return the bytes that are held between two steps, by what they are."""
        return dict(self.ledger.held())

    # ---------------------------------------------------------------------------------------------- phases

    def train(self, batch: Batch, loss_fn: LossFn, options: StepOptions) -> PhasePeak:
        """Return the peak of a step of ``TrainEngine.train_batch`` with this batch."""
        return self._peak(self._step(batch, loss_fn, options))

    def train_settled(self, batch: Batch, loss_fn: LossFn, options: StepOptions) -> PhasePeak:
        """Return the peak of a step that comes after others with such a batch.

        Gradients come where activations were, and states of optimizers where both were. Made by themselves before the
        batch, they would leave other gaps: up to 7 % more was planned. So the first step runs, and what happened in it
        happens again.
        """
        with self.ledger.recording() as events:
            self.train(batch, loss_fn, options)
        flops = self.ledger.flops
        return replace(self._peak(partial(self.ledger.repeat, events)), flops=flops)

    def _step(self, batch: Batch, loss_fn: LossFn, options: StepOptions) -> Callable[[], object]:
        rank_batch = self._part(_weighted(batch), options.max_tokens_per_micro_batch)
        return partial(train_step, self._strategy, rank_batch, loss_fn, options)

    def _part(self, packed: Batch, max_tokens: int) -> RankBatch:
        """Return the part of this rank, which has most of the tokens of each row."""
        return rank_batches(packed, self._sequences, max_tokens, sequence_parallel_size=self._sequences)[0]

    def score(self, batch: Batch, options: ScoreOptions) -> PhasePeak:
        """Return the peak of ``TrainEngine.forward_logprobs``."""
        packed = to_packed({name: batch[name] for name in LAYOUT if name in batch})
        scored = packed | {SCORED: loss_mask_of(packed)}
        rank_batch = self._part(scored, options.max_tokens_per_micro_batch)
        return self._peak(partial(score, self._strategy, rank_batch, options))

    def _peak(self, phase: Callable[[], object]) -> PhasePeak:
        ledger, allocator = self.ledger, self.ledger.allocator
        ledger.reset_peaks()
        before = allocator.allocated
        with self._running():
            phase()
        self._name_optimizer_state()
        return PhasePeak(before, allocator.peak_allocated, allocator.peak_reserved, dict(ledger.at_peak), ledger.flops)


def _weighted(batch: Batch) -> Batch:
    packed = to_packed(batch)
    return packed | {WEIGHT: token_weights("token-mean", loss_mask_of(packed), cu_seqlens=packed["cu_seqlens"])}


def step_options(max_tokens: int) -> StepOptions:
    """Return the options of a step whose micro-batches have at most so many tokens."""
    return StepOptions(max_tokens_per_micro_batch=max_tokens, max_grad_norm=1.0, temperature=1.0, with_entropy=True)


def score_options(max_tokens: int) -> ScoreOptions:
    return ScoreOptions(max_tokens_per_micro_batch=max_tokens, temperature=1.0, top_p=1.0, top_k=-1)


def batch_of(lengths: Sequence[int], prompt_tokens: int = 0) -> dict[str, Tensor]:
    """Return a packed batch of sequences of these lengths, as ``train_batch`` takes it; its values say nothing.

    Args:
        prompt_tokens: tokens at the start of each sequence that are not trained on.
    """
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= prompt_tokens for length in lengths]) if prompt_tokens else None
    batch = {
        "input_ids": torch.zeros(total, dtype=torch.long),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "old_logprobs": torch.zeros(total),
        "advantages": torch.zeros(total),
    }
    return batch if mask is None else batch | {"loss_mask": mask}
