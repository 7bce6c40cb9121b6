"""Steps of the train engine and of plain loops, from the same weights on the same tokens.

Each contender is built, warmed up, timed and closed before the next, so that each has the devices to itself.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rlcore.bench.case import Contender, Quantity
from rlcore.bench.cases.agreement import StepNumbers, Tolerance, expect_same
from rlcore.bench.cases.models import ModelShape, drawn, policy, transformers_class
from rlcore.bench.cases.workers import BenchWorker, ask_each, worker_processes
from rlcore.device import Device
from rlcore.engines.launchers.launch import choose_launcher
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.meta import meta_device
from rlcore.registry import get_device
from rlcore.tensor_data import dtype_name

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
_TIMEOUT_S = 600.0
_ROWS = 1024
"""Rows whose logits are in float32 at a time."""
_SHORT_US = 5.0
"""A gap between two kernels in which no host, it is taken, would launch the second."""

Batch = Mapping[str, Tensor]


class Setup(NamedTuple):
    """The model, the devices and the way to compute, which the contenders of a case share."""

    device_names: list[str]
    model: ModelShape
    dtype: torch.dtype
    """The dtype that is computed in; parameters are float32."""
    tokens: int
    """The most tokens of a micro-batch."""
    warm_up: int
    """Steps before those that are timed."""
    recomputes: bool
    compiles: bool = False

    @property
    def params(self) -> dict[str, int | float | str]:
        return {"model": self.model.name, "tokens": self.tokens, "dtype": dtype_name(self.dtype)}


class DeviceWork(NamedTuple):
    """The work of a device in a time."""

    busy_s: float
    """The seconds in which it had a kernel or a copy."""
    launches: float
    """The number of these."""
    between_s: float
    """The seconds without, in gaps of less than ``_SHORT_US``: the next one was queued, and the host is not late."""


class StepTimes(NamedTuple):
    """The steps of one contender."""

    numbers: StepNumbers
    seconds: list[float]
    """The seconds of each step after those that warm up."""
    first_s: float
    """The seconds of the first step, which compiles."""
    build_s: float
    peak_bytes: int
    """The peak of the device that held the most, parameters and optimizer states included."""
    seen: DeviceWork | None = None
    """The device's work in one step; None where nobody looked, or saw a kernel."""


def _times(
    setup: Setup, step: Callable[[Batch], float], batches: Sequence[Batch], reset_peak: Callable[[], object]
) -> tuple[float, list[float]]:
    """Return the first norm of gradients, and the seconds of all steps; a step ends when its metrics are there.

    Work of the optimizer that is still queued then counts in the next step.

    Args:
        step: returns the norm of gradients.
    """
    norms, seconds = [], []
    for number, batch in enumerate(batches):
        if number == setup.warm_up:
            reset_peak()
        started = time.perf_counter()
        norms.append(step(batch))
        seconds.append(time.perf_counter() - started)
    return norms[0], seconds


def engine_steps(
    setup: Setup, batches: Sequence[Batch], *, executor: str = "fsdp2", tells_busy: bool = False, **options: Any
) -> StepTimes:
    """Take the steps of a train engine.

    Args:
        tells_busy: find ``seen`` in two more steps, where the worker of an accelerator is in this process.
        options: those of the engine's ``build()``.
    """
    started = time.perf_counter()
    module = policy(setup.model, setup.dtype, setup.device_names[0].partition(":")[0])
    own: dict[str, Any] = {"compute_dtype": dtype_name(setup.dtype)}
    if executor == "fsdp2":
        own |= {"activation_checkpointing": setup.recomputes, "compile": setup.compiles}
    engine = TrainEngine(module, executor=executor)
    with engine.build(devices=setup.device_names, timeout_s=_TIMEOUT_S, **(own | options)):
        build_s = time.perf_counter() - started
        loss_fn = ppo_clip(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)

        def step(batch: Batch) -> float:
            return engine.train_batch(batch, loss_fn, max_tokens_per_micro_batch=setup.tokens)["grad_norm"]

        def scored() -> Tensor:
            return engine.forward_logprobs(batches[0], max_tokens_per_micro_batch=setup.tokens)

        before_T = scored()
        norm, seconds = _times(setup, step, batches, lambda: engine.call("reset_peak"))
        peak = max(report["stats"].peak_allocated_bytes for report in engine.memory_report())
        numbers = StepNumbers(before_T, scored(), norm)
        device = get_device(setup.device_names[0])
        is_here = not device.spec.is_host and len(setup.device_names) == 1  # the worker of several is another process
        seen = _work_seen(device, [lambda: step(batches[-1])] * 2) if tells_busy and is_here else None
    return StepTimes(numbers, seconds[setup.warm_up :], seconds[0], build_s, peak, seen)


def _work_seen(device: Device, steps: Sequence[Callable[[], object]]) -> DeviceWork | None:
    """Return the device's work in one of these steps, their mean; None if nobody saw any."""
    device.synchronize()
    with torch.profiler.profile(acc_events=True) as seen:
        for step in steps:
            step()
        device.synchronize()
    found = work_of(
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type.name != "CPU" and not event.is_user_annotation
    )
    return DeviceWork(*(value / len(steps) for value in found)) if found.launches else None


def work_of(ranges_us: Iterable[tuple[float, float]]) -> DeviceWork:
    """Return the work of kernels and copies that begin and end at these microseconds."""
    ranges = sorted(ranges_us)
    busy_us, between_us, reached = 0.0, 0.0, ranges[0][0] if ranges else 0.0
    for start, end in ranges:
        gap_us = max(0.0, start - reached)
        between_us += gap_us * (gap_us < _SHORT_US)
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return DeviceWork(busy_us / 1e6, len(ranges), between_us / 1e6)


# ----------------------------------------------------------------------------------------------- plain loops


class PlainRank(BenchWorker):
    """One rank of a loop as users write it; of one over FSDP2, as torch's own tutorials have it, the step is here."""

    setup: Setup

    def build(self) -> tuple[Any, torch.optim.Optimizer]:
        """Return what ``step`` takes; ``sharded`` makes it for FSDP2."""
        raise NotImplementedError

    def step(self, scored: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """Take a step. Return this rank's metrics to be summed over the ranks, and the norm of all gradients."""
        metrics = self.backward(scored, batch)
        norm: Any = torch.nn.utils.clip_grad_norm_(scored.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return metrics, norm.full_tensor()

    def backward(self, scored: nn.Module, batch: Batch) -> Tensor:
        """Run forward and backward, and return the metrics of ``step``."""
        raise NotImplementedError

    def logprobs(self, scored: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the tokens that this rank scores, by their places in the batch, and their log-probabilities."""
        raise NotImplementedError

    def run(self, setup: Setup, batches: Sequence[Batch]) -> StepTimes:
        started = time.perf_counter()
        self.setup = setup
        self.context.process_group(_TIMEOUT_S)
        scored, optimizer = self.build()
        build_s = time.perf_counter() - started

        def step(batch: Batch) -> float:
            metrics, norm = self.step(scored, optimizer, batch)
            dist.all_reduce(metrics)
            metrics.tolist()  # as a loop that prints them
            return float(norm)

        before_T = self._all_logprobs(scored, batches[0])
        norm, seconds = _times(setup, step, batches, self.device.memory.reset_peak)
        peak = self.device.memory.stats().peak_allocated_bytes
        numbers = StepNumbers(before_T, self._all_logprobs(scored, batches[0]), norm)
        return StepTimes(numbers, seconds[setup.warm_up :], seconds[0], build_s, peak)

    def _all_logprobs(self, scored: Any, batch: Batch) -> Tensor:
        """Return the log-prob of each token of all ranks, on the host."""
        logprob_T = torch.zeros(len(batch["input_ids"]), device=self.device.torch_device)
        with torch.no_grad():
            place_S, logprob_S = self.logprobs(scored, batch)
        logprob_T[place_S] = logprob_S
        dist.all_reduce(logprob_T)  # each token is scored by one rank
        return logprob_T.cpu()


def sharded(
    setup: Setup, scored_class: Callable[[Any], nn.Module], device: Device, mesh: Any = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a Qwen2, shard it by FSDP2, give it its weights, and return it with its optimizer.

    Args:
        scored_class: the module around the model that a loop calls.
        mesh: a mesh of all ranks; None is torch's own.
    """
    with meta_device():
        model = transformers_class("Qwen2ForCausalLM")._from_config(setup.model.config())
    weights = drawn(model, setup.dtype, device.type)
    policy = MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=torch.float32)
    for block in model.model.layers:
        if setup.recomputes:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if setup.compiles:
            block.forward = torch.compile(block.forward)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    scored = scored_class(model.float())
    fully_shard(scored, mesh=mesh, mp_policy=policy)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # rotary tables: in no checkpoint
    scored.to_empty(device=device.torch_device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            whole = weights[name][...].float()
            parameter.to_local().copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])
    return scored, torch.optim.AdamW(scored.parameters(), lr=1e-6, fused=True)


def clipped_gain(logprob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """Return PPO's clipped surrogate of each token."""
    ratio = (logprob - old).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)


def logprob_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each row's target in float32, from a few rows' logits at a time."""
    rows = zip(torch.split(logits, _ROWS), torch.split(targets, _ROWS), strict=True)
    return torch.cat([-nn.functional.cross_entropy(some.float(), right, reduction="none") for some, right in rows])


def plain_steps(
    rank_class: type[PlainRank], setup: Setup, batches: Sequence[Batch], launcher: str | None = None
) -> StepTimes:
    names = setup.device_names
    with worker_processes(rank_class, names, _TIMEOUT_S, launcher=choose_launcher(launcher, len(names))) as group:
        found: list[StepTimes] = ask_each(group, "run", setup, batches)
    slowest = [max(times) for times in zip(*(one.seconds for one in found), strict=True)]
    return found[0]._replace(seconds=slowest, peak_bytes=max(one.peak_bytes for one in found))


# ------------------------------------------------------------------------------------------------ contenders


class Compared:
    """Makes the contenders of a case. Those that train on the same tokens have to learn the same."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._first: dict[object, StepNumbers] = {}

    def contender(
        self,
        name: str,
        run: Callable[[], StepTimes],
        quantities: Callable[[StepTimes], Mapping[str, Quantity]],
        allowed: Tolerance,
        *,
        same: object = None,
        **options: Any,
    ) -> Contender:
        """Return one; ``same`` is equal for those of the same tokens, ``options`` are those of ``Contender``."""

        def run_alone() -> StepTimes:
            gc.collect()
            self._device.memory.empty_cache()
            torch.compiler.reset()  # blocks of all contenders are one function to it, which it compiles a few times
            return run()

        def check(done: StepTimes) -> None:
            expect_same(done.numbers, self._first.setdefault(same, done.numbers), allowed)

        return Contender(name, run_alone, check, seconds=lambda done: done.seconds, quantities=quantities, **options)
