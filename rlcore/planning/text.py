"""A plan in words, in lines of 80 characters where nothing in them is longer."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlcore.cli.console import aligned
from rlcore.planning.step import PhaseMemory, StepPlan, schedule

if TYPE_CHECKING:
    from rlcore.planning.plan import MemoryPlan

_GIB = 2**30
_WIDTH = 80


def text_of(plan: MemoryPlan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: MemoryPlan) -> Iterator[str]:
    best, device = plan.best, plan.device
    trained = (
        "" if plan.model.num_trained == plan.model.num_parameters else f", {_count(plan.model.num_trained)} trained"
    )
    about = f"{plan.model.name}: {_count(plan.model.num_parameters)} parameters{trained}"
    yield from textwrap.wrap(about, _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield f"on {best.layout.count} x {device.name}, {_gib(device.total_bytes)} GiB each"
    yield ""
    yield from aligned(list(_phase_rows(best)))
    yield ""
    if best.fits:
        yield f"It fits, with {_gib(best.spare_bytes)} GiB of a device to spare."
        yield f"The largest max_tokens_per_micro_batch is about {plan.largest_max_tokens}."
    else:
        missing = f"It does not fit: {_gib(-best.spare_bytes)} GiB of a device are missing. {_remedy(best)}"
        yield from textwrap.wrap(missing, _WIDTH)
    if plan.has_sampler:
        yield f"The sampler's KV cache holds {best.kv_tokens} tokens on {best.layout.tensor_parallel} device(s)."
        moved = f"{_gib(best.moved_bytes)} GiB a device move to the host or back in a step{_moving(best)}."
        yield from textwrap.wrap(moved, _WIDTH)
    yield ""
    call = "train.build("
    options = [f"{name}={value!r}" for name, value in (dict(plan.options) | best.layout.build_options()).items()]
    yield call + f"\n{' ' * len(call)}".join(_folded(options, _WIDTH - len(call))) + ")"
    if plan.has_sampler:
        yield f'infer.build(colocate_with=train, tensor_parallel_size={best.layout.tensor_parallel})  # executor="vllm"'
    yield ""
    yield "each step:"
    yield from (f"  {call}" for call in schedule(best, plan.has_sampler))
    if plan.others:
        yield ""
        yield "the next best:"
        yield from aligned(list(_layout_rows([best, *plan.others])))


def _phase_rows(plan: StepPlan) -> Iterator[list[str]]:
    has_seconds = any(phase.seconds for phase in plan.phases)
    rows = [["", "GiB of", "host"], ["phase", "a device", "GiB"]]
    rows += [[phase.name, _gib(phase.device_bytes), _gib(phase.host_bytes)] for phase in plan.phases]
    if has_seconds:
        seconds = ["seconds a", "micro-batch", *map(_seconds, plan.phases)]
        rows = [[*row, cell] for row, cell in zip(rows, seconds, strict=True)]
    room = _WIDTH - sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    parts = [[""], ["of these"], *(_folded(_parts(phase), room) for phase in plan.phases)]
    for row, (first, *others) in zip(rows, parts, strict=True):
        yield [*row, first]
        yield from ([*[""] * len(row), other] for other in others)


def _layout_rows(plans: list[StepPlan]) -> Iterator[list[str]]:
    yield ["", "", "sequence", "tensor", "", "", "", "GiB to", "KV"]
    yield ["shards", "copies", "parallel", "parallel", "recompute", "tokens", "offloaded", "spare", "tokens"]
    for one in plans:
        layout = one.layout
        away = ", ".join(layout.offload) or "nothing"
        numbers = [layout.shards, layout.replicas, layout.sequence_parallel, layout.tensor_parallel, layout.recompute]
        yield [*map(str, numbers), str(layout.max_tokens), away, _gib(one.spare_bytes), str(one.kv_tokens)]


def _remedy(plan: StepPlan) -> str:
    worst = max(plan.phases, key=lambda phase: phase.device_bytes)
    part = max(worst.parts, key=lambda name: worst.parts[name])
    ways = "more devices, a smaller longest sequence, lora=, or options={'dtype': 'bfloat16'}"
    return f"Most of it are the {part} of the phase {worst.name}; what helps: {ways}."


def _parts(phase: PhaseMemory) -> list[str]:
    largest = sorted(phase.parts.items(), key=lambda item: -item[1])
    return [f"{name} {_gib(size)}" for name, size in largest if size >= _GIB // 100]


def _folded(parts: Sequence[str], room: int) -> list[str]:
    """Return the parts with commas between them, in lines with so much room; a part is never cut."""
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(", ") + len(part) < room or not lines[-1]:
            lines[-1] += f", {part}" if lines[-1] else part
        else:
            lines[-1] += ","
            lines.append(part)
    return lines


def _moving(plan: StepPlan) -> str:
    return "" if plan.move_seconds is None else ", in {:.3g} to {:.3g} s".format(*plan.move_seconds)


def _seconds(phase: PhaseMemory) -> str:
    return "not in the record" if phase.seconds is None else "{:.3g} to {:.3g}".format(*phase.seconds)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 10**8 else f"{number / 1e6:.2f} million"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}"
