"""``advice`` says what would make a step faster, and by how much at most, by the machine's measured limits.

Each row is about one part of a step alone. The rows do not add up: what is hidden cannot be made faster as well.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.bench.reports import text
from rlcore.trace.events import ProgramTrace, TracedSpan
from rlcore.trace.gaps import PROGRAM, SPAN_OF_PROGRAM, WAY_TO_WORKERS, DeviceTimeline
from rlcore.trace.phases import COMPUTE, GENERATES, MeasuredSteps, kind_of, limit_of

_LEAST_SHARE = 0.005
"""The share of a step below which nothing is worth a row."""
_ON_THE_WAY = "calls on their way to workers and back"


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that could be faster."""

    what: str
    seconds: float
    """The time that it takes of a step now."""
    best_s: float | None
    """The least that it could take; None where no limit was measured."""
    how: str

    @property
    def saved_s(self) -> float:
        return 0.0 if self.best_s is None else max(0.0, self.seconds - self.best_s)


def advice(
    trace: ProgramTrace, steps: MeasuredSteps, devices: Sequence[DeviceTimeline], limits: Mapping[str, float] | None
) -> list[Advice]:
    """Return what could be faster, the most first.

    Args:
        limits: of a bench record's calibration; None: only what needs no limit has a number.
    """
    calls = [span for span in trace.calls if steps.has(span)]
    count = len(steps.measured)
    found = [
        *_copies(calls, count, limits or {}),
        *_swaps(trace, calls, count),
        *_products(trace, calls, count, limits or {}),
        *_decoding(trace, calls, count, limits or {}),
        *_syncs(calls, count, limits or {}),
        *_saves(calls, count),
        *_own_time(devices, steps),
        *_hidden(trace, calls, count),
    ]
    least_s = _LEAST_SHARE * steps.seconds
    return sorted((one for one in found if one.seconds >= least_s), key=lambda one: (-one.saved_s, -one.seconds))


def _copies(calls: Sequence[TracedSpan], count: int, limits: Mapping[str, float]) -> Iterator[Advice]:
    groups: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    pageable, first = set(), set()
    for span in calls:
        for move, facts in _moves(span):
            key = f"{move} {facts['tag']}", str(span.facts.get("engine", ""))
            groups[key].append((facts.get("most_bytes", 0), facts.get("seconds", 0.0)))
            if facts.get("most_bytes") and not facts.get("pinned", True):
                pageable.add(key)
            if facts.get("first_use"):
                first.add(key)
    for key, moved in groups.items():
        nbytes, seconds = (sum(part) / count for part in zip(*moved, strict=True))
        if not nbytes:
            continue
        limit = limits.get(limit_of(key[0]))
        how = f"{text.rate(nbytes, 'B')} a step: move less often, or swap() it with what comes back"
        if key in pageable:
            how = "its host memory is not pinned: `rlcore doctor` says why; pinned copies go at the link's limit"
        elif key in first:
            how = "host memory was allocated on the way: build(reserve_host_bytes=) does so beforehand"
        yield Advice(f"{key[0]}, {key[1]}", seconds, None if limit is None else nbytes / limit, how)


def _moves(span: TracedSpan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "moves" in span.facts:
        for one in span.facts["moves"]:
            yield str(one["move"]), one
    elif "tag" in span.facts and span.name in ("onload", "offload"):
        yield span.name, span.facts


def _swaps(trace: ProgramTrace, calls: Sequence[TracedSpan], count: int) -> Iterator[Advice]:
    """One engine leaves, another comes, and nothing is computed in between: both ways of the link can work at once."""
    both_s = 0.0
    run: list[TracedSpan] = []
    for span in [*calls, None]:
        can_swap = span is not None and trace.engines.get(span.engine, {}).get("can_swap", True)
        if span is not None and can_swap and span.name in ("onload", "offload"):
            run.append(span)
            continue
        out_s, in_s = (sum(one.seconds for one in run if one.name == name) for name in ("offload", "onload"))
        both_s += min(out_s, in_s)
        run = []
    if both_s:
        how = "rlcore.swap(out=, in_=) moves both ways at once, in the time of the longer way"
        yield Advice("offload, then onload, one after the other", 2 * both_s / count, both_s / count, how)


def _products(
    trace: ProgramTrace, calls: Sequence[TracedSpan], count: int, limits: Mapping[str, float]
) -> Iterator[Advice]:
    for name, operations, pays in (("train_step", 6, "train_batch"), ("score", 2, "forward_logprobs")):
        own = [span for span in calls if span.name == name and "tokens" in span.facts]
        if not own:
            continue
        engine = trace.engines.get(own[0].engine, {})
        devices, parameters = engine.get("devices") or ["cpu:0"], engine.get("num_parameters") or 0
        tokens, seconds = (
            sum(part) / count for part in zip(*((s.facts["tokens"], s.seconds) for s in own), strict=True)
        )
        kind = "float32" if str(devices[0]).rpartition("/")[2].startswith("cpu") else "bfloat16"
        limit = limits.get(f"product/{kind}")
        best_s = None if limit is None else operations * parameters * tokens / len(devices) / limit
        share = "" if best_s is None else f"{best_s / seconds:.0%} of the machine's {kind} products; "
        num_micro = statistics.mean(span.facts.get("micro_batches", 1) for span in own)
        how = (
            f"{share}{tokens:.0f} tokens in {num_micro:.3g} micro-batches: larger ones with max_tokens_per_micro_batch"
        )
        yield Advice(pays, seconds, best_s, how)


def _decoding(
    trace: ProgramTrace, calls: Sequence[TracedSpan], count: int, limits: Mapping[str, float]
) -> Iterator[Advice]:
    own = [span for span in calls if span.name == "generate" and "longest" in span.facts]
    if not own:
        return
    weights = trace.engines.get(own[0].engine, {}).get("weights_bytes") or 0
    num_devices = len(trace.engines.get(own[0].engine, {}).get("devices") or [0])
    seconds, longest = (sum(part) / count for part in zip(*((s.seconds, s.facts["longest"]) for s in own), strict=True))
    limit = limits.get("memory")
    best_s = None if limit is None else longest * weights / num_devices / limit
    how = (
        f"the longest completion, {statistics.mean(s.facts['longest'] for s in own):.0f} tokens, reads the weights as "
        "often: CUDA graphs (executor vllm), fewer long completions, more samples at once"
    )
    yield Advice("generate", seconds, best_s, how)


def _syncs(calls: Sequence[TracedSpan], count: int, limits: Mapping[str, float]) -> Iterator[Advice]:
    own = [span for span in calls if span.name == "sync_weights" and "bytes" in span.facts]
    if not own:
        return
    seconds, nbytes = (sum(part) / count for part in zip(*((s.seconds, s.facts["bytes"]) for s in own), strict=True))
    route = str(own[0].facts.get("route"))
    limit = limits["memory"] / 2 if route in ("local", "direct") and "memory" in limits else limits.get("link")
    how = f"{text.rate(nbytes, 'B')} by route {route}; SyncReport.calls_s says which of its calls takes long"
    yield Advice("sync_weights", seconds, None if limit is None else nbytes / limit, how)


def _saves(calls: Sequence[TracedSpan], count: int) -> Iterator[Advice]:
    seconds = sum(span.seconds for span in calls if span.name == "save") / count
    if seconds:
        yield Advice("save", seconds, 0.0, "save(blocking=False) writes in the background, after a copy to the host")


def _own_time(devices: Sequence[DeviceTimeline], steps: MeasuredSteps) -> Iterator[Advice]:
    """Yield the time that the program takes itself while devices wait."""
    sums: defaultdict[str, float] = defaultdict(float)
    for device in devices:
        for gap in device.gaps:
            is_on_way = gap.cause.startswith(WAY_TO_WORKERS)
            if is_on_way or gap.cause == PROGRAM or gap.cause.startswith(SPAN_OF_PROGRAM):
                cause = _ON_THE_WAY if is_on_way else gap.cause
                sums[cause] += steps.share(gap.begin_ns, gap.end_ns) / len(devices)
    for cause, seconds in sums.items():
        how = "rewards in a RewardPool, batches prepared beside training (RolloutController)"
        if cause == _ON_THE_WAY:
            how = "arguments and results travel to the workers and back; launcher='inline' has no way for one worker"
        yield Advice(cause, seconds, 0.0, how)


def _hidden(trace: ProgramTrace, calls: Sequence[TracedSpan], count: int) -> Iterator[Advice]:
    """Generation and training by turns, on devices of their own: one can hide behind the other."""
    used: dict[str, set[str]] = {"train": set(), "inference": set()}
    for engine in trace.engines.values():
        used.setdefault(str(engine.get("kind")), set()).update(engine.get("devices") or [])
    if not used["train"] or not used["inference"] or used["train"] & used["inference"] or trace.lanes:
        return
    sides = [0.0, 0.0]
    for span in calls:
        if kind_of(span) == COMPUTE:
            sides[span.name in GENERATES] += span.seconds / count
    how = "they have devices of their own: RolloutController(max_staleness=1) generates while it trains"
    yield Advice("generation and training by turns", sum(sides), max(sides), how)
