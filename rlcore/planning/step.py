"""The memory of each phase of a step, and what has to leave the devices in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlcore.engines.memory_plan.trainer import PhasePeak
from rlcore.planning.layout import StepLayout
from rlcore.planning.traces import Traces

_KV_SHARE = 0.7
"""The share of the memory that the sampler's weights leave free, as ``engines/sampling/vllm/arguments.py`` gives it to
vLLM; the rest is for its activations and captured graphs."""
_AWAY = ((), ("optimizer",), ("optimizer", "weights"))
"""The tags of the trainer that leave the device while the sampler runs; the first that fits moves the least."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """One phase of a step, on each device."""

    name: str
    device_bytes: int
    """All processes together, with their contexts and what their allocators keep; in the phase "sample" without what
    the sampler's activations and captured graphs take, for which the rest is left free."""
    parts: Mapping[str, int]
    """Bytes by what they are."""
    host_bytes: int
    """Host memory of what is away, for each device."""
    seconds: tuple[float, float] | None = None
    """From a record, the least and the most: of one micro-batch of score and train, of a whole sync."""


@dataclass(frozen=True, slots=True)
class SamplerSize:
    """The sampler of a plan: vLLM, in 16 bits."""

    weight_bytes: int
    """The weights of a whole copy."""
    token_bytes: int
    """Keys and values of one token."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A layout with its phases."""

    layout: StepLayout
    phases: tuple[PhaseMemory, ...]
    capacity: int
    """The memory of a device."""
    kv_tokens: int
    """Tokens that the sampler's cache holds on the devices of one copy."""
    moved_bytes: int
    """Copied to the host and back in a step, for each device."""
    flops: int
    """Operations of one micro-batch of training, for each device."""
    score_flops: int
    move_seconds: tuple[float, float] | None = None
    """The time of ``moved_bytes``, from a record."""

    @property
    def fits(self) -> bool:
        return all(phase.device_bytes <= self.capacity for phase in self.phases)

    @property
    def spare_bytes(self) -> int:
        """Return what is left in the phase that leaves the least; the KV cache takes a share of what there is."""
        return self.capacity - max(phase.device_bytes for phase in self.phases if phase.name != "sample")


@dataclass(frozen=True, slots=True)
class _TrainerMemory:
    """The trainer on one device."""

    held: dict[str, int]
    score: Mapping[str, int]
    train: Mapping[str, int]
    flops: int
    score_flops: int


def plan_step(traces: Traces, layout: StepLayout, sampler: SamplerSize | None) -> StepPlan:
    """Return the phases of a step: sample, score, train and sync; without a sampler score and train."""
    device, trainer = traces.device, _trainer(traces, layout)
    context, away = device.context_bytes, layout.offload
    resident = {name: size for name, size in trainer.held.items() if name not in away}
    host_bytes = sum(size for name, size in trainer.held.items() if name in away)
    phases: list[PhaseMemory] = []
    kv_tokens = 0
    if sampler is not None:
        weights = -(-sampler.weight_bytes // layout.tensor_parallel)
        room = device.total_bytes - 2 * context - sum(resident.values()) - weights
        kv_bytes = max(0, int(room * _KV_SHARE))
        kv_tokens = kv_bytes * layout.tensor_parallel // sampler.token_bytes if sampler.token_bytes else 0
        sampling = {"sampler's weights": weights, "KV cache": kv_bytes}
        contexts = {"contexts": 2 * context}
        phases.append(_phase("sample", resident | sampling | contexts, host_bytes))
    else:
        contexts, weights = {"contexts": context}, 0
    scoring = {name: size for name, size in trainer.score.items() if name != "optimizer" or name not in away}
    optimizer_away = trainer.held["optimizer"] if "optimizer" in away else 0
    phases.append(_phase("score", scoring | contexts, weights + optimizer_away))
    phases.append(_phase("train", dict(trainer.train) | contexts, weights))
    if sampler is not None:
        syncing = {name: size for name, size in trainer.held.items() if name == "weights" or name not in away}
        phases.append(_phase("sync", syncing | {"sampler's weights": weights} | contexts, optimizer_away))
    moved = 2 * (host_bytes + weights)
    return StepPlan(layout, tuple(phases), device.total_bytes, kv_tokens, moved, trainer.flops, trainer.score_flops)


def _phase(name: str, parts: Mapping[str, int], host_bytes: int) -> PhaseMemory:
    return PhaseMemory(name, sum(parts.values()), {part: size for part, size in parts.items() if size}, host_bytes)


def _trainer(traces: Traces, layout: StepLayout) -> _TrainerMemory:
    shards = layout.shards
    trace = traces.trace(
        layout.recompute, layout.max_tokens, sequence_parallel=layout.sequence_parallel, is_gathered=shards > 1
    )
    held = traces.held(shards)
    if shards == 1:
        return _TrainerMemory(
            held, _with_cached(trace.score), _with_cached(trace.train), trace.train.flops, trace.score.flops
        )
    found = traces.gathered(shards)
    of_score = {"gathered weights": found.weights} | _computed(trace.score)
    of_train: dict[str, int] = {"gathered weights": found.weights}
    computed, exchange = _computed(trace.train), {"gradients in exchange": found.exchange}
    if traces.sharding(layout.recompute).reduce_each_micro_batch:
        of_train["gradients"] = -(-found.whole_gradients // shards)
        computed |= {"gradients in exchange": found.overlapping}
    else:
        of_train["gradients"] = found.whole_gradients
    of_train |= computed if sum(computed.values()) > sum(exchange.values()) else exchange
    return _TrainerMemory(
        held,
        _cached(held | of_score, trace.score),
        _cached(held | of_train, trace.train),
        trace.train.flops,
        trace.score.flops,
    )


def _computed(peak: PhasePeak) -> dict[str, int]:
    return {name: peak.parts.get(name, 0) for name in ("activations", "logits", "workspaces of libraries")}


def _with_cached(peak: PhasePeak) -> dict[str, int]:
    return {**peak.parts, "kept by the allocator": peak.reserved - sum(peak.parts.values())}


def _cached(parts: dict[str, int], like: PhasePeak) -> dict[str, int]:
    """Add what the allocator would keep if it kept as large a share as in a trace."""
    share = like.reserved / max(like.allocated, 1) - 1
    return {**parts, "kept by the allocator": int(sum(parts.values()) * share)}


def fitting(traces: Traces, layout: StepLayout, sampler: SamplerSize | None, min_kv_tokens: int) -> StepPlan | None:
    """Return the plan with the least to move that fits, if there is one."""
    for away in _AWAY if sampler is not None else _AWAY[:1]:
        found = plan_step(traces, replace(layout, offload=away), sampler)
        if found.fits and (sampler is None or not sampler.token_bytes or found.kv_tokens >= min_kv_tokens):
            return found
    return None


def schedule(plan: StepPlan, has_sampler: bool) -> list[str]:
    """Return the calls of one step, in order."""
    if not has_sampler:
        return ["train.forward_logprobs(batch)", "train.train_batch(batch, loss_fn)"]
    away = ", ".join(f'"{tag}"' for tag in plan.layout.offload)
    calls: list[str] = []
    if away:
        calls.append(f"train.offload({away})")
    calls += ['infer.onload("weights", "kv_cache"); infer.generate(...)', 'infer.offload("weights", "kv_cache")']
    if "weights" in plan.layout.offload:
        calls.append('train.onload("weights")')
    calls.append("train.forward_logprobs(batch)")
    if "optimizer" in plan.layout.offload:
        calls.append('train.onload("optimizer")')
    calls.append(f"train.train_batch(batch, loss_fn, max_tokens_per_micro_batch={plan.layout.max_tokens})")
    if "optimizer" in plan.layout.offload:
        calls.append('train.offload("optimizer")')
    calls.append('infer.onload("weights"); train.sync_weights(infer)')
    return calls
