"""``rlcore.plan()``: the memory and the seconds of a step, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlcore.arguments import COUNT, FLAG, MAPPING, PATH, TEXT, WHOLE, Kind, optional, takes
from rlcore.engines.fsdp2.sharding import Sharding
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.nn import TrainModule
from rlcore.packed.dry_runs import shared_dry_runs
from rlcore.planning.hardware import Hardware, hardware
from rlcore.planning.layout import Recompute, StepLayout
from rlcore.planning.model import MakeOptimizer, PlannedModel, planned_model
from rlcore.planning.rates import Rates
from rlcore.planning.step import SamplerSize, StepPlan, fitting, plan_step, schedule
from rlcore.planning.traces import Traces, cache_bytes_per_token

_SHOWN = 5
_RECOMPUTE: tuple[Recompute, ...] = (False, "selective", True)
"""The least to compute first."""
_MULTIPLES = (4, 2, 1)
_MOST_TOKENS = 32768
"""The longest sequences of a micro-batch that is looked for, and the tokens beyond which a larger one gains nothing."""
_SEQUENCES = 32
"""Sequences of the longest that the sampler's cache must hold: with fewer, vLLM computes for too few at a time."""
_STEP, _TRIES, _CAUTION = 256, 3, 0.98
_NOT_PLANNED = (
    "activation_checkpointing", "replicas", "sequence_parallel_size", "compile", "tensor_parallel_size",
    "expert_parallel_size", "deterministic",
)  # fmt: skip
_OWN_NAMES = {
    "activation_checkpointing": "recompute",
    "replicas": "replicas",
    "sequence_parallel_size": "sequence_parallel",
}
"""Options of a build -> the argument of a plan."""
_LARGEST = 1 << 17
"""Tokens of a micro-batch beyond which nobody looks: it would keep any device busy."""
_MOST_DEVICES = 1 << 20
"""More are no plan: each divisor of their number is a layout."""
_DEVICES = Kind(
    f"a whole number from 1 to {_MOST_DEVICES:,}", lambda value: COUNT.has(value) and value <= _MOST_DEVICES
)
_MOST_LONG = 1 << 24
"""Tokens of a sequence or a micro-batch: no model reads as many, and with many more the sizes of tensors overflow."""
_TOKENS = Kind(f"a whole number from 1 to {_MOST_LONG:,}", lambda value: COUNT.has(value) and value <= _MOST_LONG)
_RANK = Kind("a whole number of at least 1, or a mapping", lambda value: COUNT.has(value) or MAPPING.has(value))
_SIZES = {
    "count": optional(_DEVICES),
    "memory_bytes": optional(COUNT),
    "longest": _TOKENS,
    "prompt_tokens": WHOLE,
    "max_tokens": optional(_TOKENS),
    "replicas": optional(COUNT),
    "sequence_parallel": optional(COUNT),
    "tensor_parallel": optional(COUNT),
    "lora": optional(_RANK),
}
_OTHERS = {
    "device": optional(TEXT),
    "sampler": FLAG,
    "optimizer": optional(Kind("a function", callable)),
    "options": optional(MAPPING),
    "record": optional(PATH),
}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The answer of ``rlcore.plan``. ``str(plan)`` is what ``rlcore plan`` prints."""

    model: PlannedModel
    device: Hardware
    options: Mapping[str, Any]
    """The build options that were given, and are the same in all layouts."""
    best: StepPlan
    """The one that computes and moves the least of those that fit; where none does, the one that lacks the least."""
    others: tuple[StepPlan, ...]
    """The next best."""
    largest_max_tokens: int
    """The most ``max_tokens_per_micro_batch`` with which the best layout fits, at most 131,072; 0 where none does."""
    has_sampler: bool

    @property
    def fits(self) -> bool:
        return self.best.fits

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""

        def plain(one: StepPlan) -> dict[str, Any]:
            return {
                "layout": asdict(one.layout),
                "fits": one.fits,
                "spare_bytes": one.spare_bytes,
                "kv_tokens": one.kv_tokens,
                "moved_bytes": one.moved_bytes,
                "phases": [asdict(phase) for phase in one.phases],
                "schedule": schedule(one, self.has_sampler),
            }

        return {
            "model": self.model.name,
            "parameters": self.model.num_parameters,
            "trained_parameters": self.model.num_trained,
            "device": asdict(self.device),
            "options": dict(self.options),
            "largest_max_tokens_per_micro_batch": self.largest_max_tokens,
            **plain(self.best),
            "others": [plain(one) for one in self.others],
        }

    def __str__(self) -> str:
        from rlcore.planning.text import text_of

        return text_of(self)


@takes("plan()", **_SIZES, **_OTHERS)
@shared_dry_runs()
def plan(
    model: Any,
    *,
    device: str | None = None,
    count: int | None = None,
    memory_bytes: int | None = None,
    longest: int = 4096,
    prompt_tokens: int = 0,
    max_tokens: int | None = None,
    recompute: Recompute | None = None,
    replicas: int | None = None,
    sequence_parallel: int | None = None,
    tensor_parallel: int | None = None,
    sampler: bool = True,
    lora: Mapping[str, Any] | int | None = None,
    optimizer: MakeOptimizer | None = None,
    options: Mapping[str, Any] | None = None,
    record: str | os.PathLike[str] | None = None,
) -> MemoryPlan:
    """Plan a step of reinforcement learning on devices that need not be here; nothing is computed or read.

    What is left out is looked for: the layouts that fit are compared by what they compute, then by what they move.

    Args:
        model: a model folder or its config.json, transformers' configuration, or a ``TrainModule`` made under
            ``rlcore.meta_device()``, which is planned with its own optimizer.
        device: "h200" or another of ``rlcore/planning/hardware.toml``, or a device that is here; None is the best here.
        count: devices, which trainer and sampler share in turns; None is one.
        memory_bytes: memory of a device, where it is not that of the table.
        longest: tokens of the longest sequence, prompt and answer.
        prompt_tokens: tokens at the start of each sequence that are not trained on.
        max_tokens: ``max_tokens_per_micro_batch``.
        recompute: ``activation_checkpointing`` of the fsdp2 executor.
        replicas: copies of the trainer's weights (HSDP).
        sequence_parallel: devices that share the tokens of each micro-batch of the trainer (Ulysses). What is left out
            is 1, and more where nothing fits so.
        tensor_parallel: devices of one copy of the sampler.
        sampler: False plans the trainer alone.
        lora: the rank of adapters on all linear layers, or the arguments of ``peft.LoraConfig``.
        optimizer: makes the optimizer of the trained parameters; None is torch's fused AdamW.
        options: further build options of the fsdp2 executor; by default ``compute_dtype="bfloat16"``.
        record: a file of ``rlcore bench`` of such a device, from which seconds are computed.

    Raises:
        InvalidInputError: a value that is not accepted, or numbers that do not go together.
        CheckpointError: no model can be made of what was given.
        UnsupportedError: the model's forward needs values, or its code fails on meta tensors.
    """
    found, target = planned_model(model, lora=lora, optimizer=optimizer), hardware(device, memory_bytes)
    common = {"compute_dtype": "bfloat16"} if options is None else dict(options)
    _check(common, longest, prompt_tokens, max_tokens)
    rates = None if record is None else Rates.of(record, target)
    traces = Traces(found, target, longest, prompt_tokens, common)
    heads = _attention_heads(found)
    wanted = _LayoutSearch(count or 1, max_tokens, recompute, replicas, tensor_parallel, sequence_parallel or 1, heads)
    needs = _sampler_of(found) if sampler else None
    best, *others = _ranked(traces, wanted, needs)
    if not best.fits and sequence_parallel is None:
        best, *others = _sharing_sequences(traces, wanted, needs) or (best, *others)
    if rates is not None:
        weight_bytes = 2 * found.num_parameters
        best, *others = [rates.timed(one, weight_bytes) for one in (best, *others)]
    most = _largest(traces, best, needs) if best.fits else 0
    return MemoryPlan(found, target, common, best, tuple(others[: _SHOWN - 1]), most, needs is not None)


@dataclass(frozen=True, slots=True)
class _LayoutSearch:
    """The layouts to look at; a size that is None is looked for."""

    count: int
    max_tokens: int | None
    recompute: Recompute | None
    replicas: int | None
    tensor_parallel: int | None
    sequence_parallel: int
    """Devices that share the trainer's sequences."""
    attention_heads: int
    """Devices of one copy of the sampler divide them; 0 is unknown."""

    def layouts(self, longest: int) -> Iterator[list[StepLayout]]:
        """Yield layouts that differ in tokens alone, the most first."""
        divisors = [size for size in range(1, self.count + 1) if self.count % size == 0]
        copies = divisors if self.replicas is None else [self.replicas]
        copies = [one for one in copies if self.count // one % self.sequence_parallel == 0]
        widths = [one for one in divisors if one <= 8 and self.attention_heads % one == 0]
        if self.tensor_parallel is not None:
            widths = [self.tensor_parallel]
        levels = _RECOMPUTE if self.recompute is None else (self.recompute,)
        sizes = [self.max_tokens] if self.max_tokens is not None else _sizes(longest)
        for recompute in levels:
            for replicas in copies:
                for width in widths:
                    base = StepLayout(
                        count=self.count,
                        replicas=replicas,
                        sequence_parallel=self.sequence_parallel,
                        tensor_parallel=width,
                        recompute=recompute,
                    )
                    yield [replace(base, max_tokens=size) for size in sizes]


def _sizes(longest: int) -> list[int]:
    sizes = [longest * times for times in _MULTIPLES]
    return [size for size in sizes if size <= _MOST_TOKENS] or sizes[-1:]


def _check(options: dict[str, Any], longest: int, prompt_tokens: int, max_tokens: int | None) -> None:
    try:
        Sharding(**options)
    except TypeError as error:
        raise InvalidInputError(f"options= of plan() are those of the fsdp2 executor's build: {error}") from error
    if options.get("compute_dtype") == "float8":
        raise InvalidInputError("options= of plan() has compute_dtype='float8': plans do not know it; plan bfloat16")
    for name in _NOT_PLANNED:
        if name in options:
            said = f"give it as {_OWN_NAMES[name]}=" if name in _OWN_NAMES else "plans do not know it"
            raise InvalidInputError(f"options= of plan() has {name}: {said}")
    if longest < 2:
        raise InvalidInputError(f"longest must be at least 2 tokens, got {longest}")
    if not 0 <= prompt_tokens < longest:
        raise InvalidInputError(f"prompt_tokens must be from 0 to below longest={longest}, got {prompt_tokens!r}")
    if max_tokens is not None and max_tokens < longest:
        raise InvalidInputError(
            f"max_tokens={max_tokens} is less than longest={longest}, the tokens of one sequence; raise it"
        )


def _sampler_of(model: PlannedModel) -> SamplerSize:
    base = sum(p.numel() for name, p in model.module.named_parameters() if ".lora_" not in name)
    return SamplerSize(weight_bytes=2 * base, token_bytes=cache_bytes_per_token(model))


def _attention_heads(model: PlannedModel) -> int:
    config = model.config.get_text_config() if model.config is not None else None
    return int(getattr(config, "num_attention_heads", 0) or 0)


def _ranked(traces: Traces, wanted: _LayoutSearch, sampler: SamplerSize | None) -> list[StepPlan]:
    """Return plans that fit, the best first; or the one that lacks the least."""
    for name, size in (("replicas", wanted.replicas), ("tensor_parallel", wanted.tensor_parallel)):
        if size is not None and wanted.count % size:
            raise InvalidInputError(f"{name} must divide the {wanted.count} devices, got {size}")
    copy = wanted.count // (wanted.replicas or 1)
    if copy % wanted.sequence_parallel:
        raise InvalidInputError(
            f"sequence_parallel must divide the {copy} devices of a copy of the trainer, got {wanted.sequence_parallel}"
        )
    if wanted.sequence_parallel > 1:
        traces.model.module.check_sequence_parallel(wanted.sequence_parallel)
    if wanted.tensor_parallel is not None and wanted.attention_heads % wanted.tensor_parallel:
        raise InvalidInputError(
            f"tensor_parallel must divide the {wanted.attention_heads} attention heads, got {wanted.tensor_parallel}"
        )
    found: list[StepPlan] = []
    least: list[StepPlan] = []
    enough = _SEQUENCES * traces.longest
    for layouts in wanted.layouts(traces.longest):
        for layout in layouts:
            here = fitting(traces, layout, sampler, enough)
            if here is not None:
                found.append(here)
                break
        else:
            least.append(plan_step(traces, replace(layouts[-1], offload=("optimizer", "weights")), sampler))
        if len({one.layout.recompute for one in found}) > 1:
            break  # the next level computes more
    if not found:
        return [max(least, key=lambda one: one.spare_bytes)]
    return sorted(found, key=_cost)


def _sharing_sequences(traces: Traces, wanted: _LayoutSearch, sampler: SamplerSize | None) -> list[StepPlan]:
    """Return plans whose devices share sequences, as few of them as fit; none where they do not help."""
    copy = wanted.count // (wanted.replicas or 1)
    for size in range(2, copy + 1):
        if copy % size == 0 and _can_share(traces.model.module, size):
            found = _ranked(traces, replace(wanted, sequence_parallel=size), sampler)
            if found[0].fits:
                return found
    return []


def _can_share(module: TrainModule, num_ranks: int) -> bool:
    try:
        module.check_sequence_parallel(num_ranks)
    except UnsupportedError:
        return False
    return True


def _cost(plan: StepPlan) -> tuple[float, ...]:
    """Return work for each token, moves, exchanges, parts of the sampler and tokens at a time: the best are least."""
    layout = plan.layout
    return (
        plan.flops * layout.sequence_parallel / layout.max_tokens,
        plan.moved_bytes,
        layout.shards > 1,
        layout.tensor_parallel,
        -layout.max_tokens,
    )


def _largest(traces: Traces, best: StepPlan, sampler: SamplerSize | None) -> int:
    """Return the largest micro-batch that fits, to some hundred tokens.

    Memory grows by the same for each token, as soon as a micro-batch is large: the next size is found on the line
    through the last two, and planned in turn.
    """

    def spare(tokens: int) -> int:
        return plan_step(traces, replace(best.layout, max_tokens=tokens), sampler).spare_bytes

    low, room = best.layout.max_tokens, best.spare_bytes
    high = 2 * low
    for _ in range(_TRIES):
        high = min(high, max(_LARGEST, low + 1))
        room_there = spare(high)
        slope = (room - room_there) / (high - low)
        if slope <= 0:
            return high
        if room_there >= 0:
            low, room = high, room_there
        guess = int((low + room / slope * _CAUTION) // _STEP * _STEP)
        if abs(guess - low) < _STEP or low >= _LARGEST:
            break
        high = guess
    return low
