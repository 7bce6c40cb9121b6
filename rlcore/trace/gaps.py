"""When each device computed, and why it did not in between: a copy, a sync, another device, or the program itself."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlcore.trace.events import ProgramTrace, TracedSpan, merged
from rlcore.trace.phases import COMPUTE, COPY, SYNC, described, kind_of, public_name

PROGRAM = "the program, outside the engines"
SPAN_OF_PROGRAM, WAY_TO_WORKERS = "the program: ", "arguments and results"
"""The beginnings of two kinds of causes: a span of the program's, and a call whose worker does not compute."""
_SAME_NS = 5_000_000
"""Calls of ``collect`` follow each other: one that begins so soon after another goes on with the same work."""
_OF_TRAINER = {
    "wait": ("the train engine", "episodes"),
    "evaluate": ("the train engine", "an evaluation"),
    "sync": ("the inference engine", "the weight sync"),
}
"""Action of a RolloutController's trainer -> the engine that is idle meanwhile, and why it is."""
_OF_WORKER, _OF_LANE, _OF_PROGRAM, _NOTHING = range(4)


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a device did not compute."""

    begin_ns: int
    end_ns: int
    cause: str
    """In words that are the same for all gaps of the kind, such as "onload optimizer"."""
    detail: str
    """With bytes and rates, where it is a copy."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """One device, from its first call to its last."""

    name: str
    """With its host, where the trace has several."""
    spans: list[TracedSpan]
    """All calls of workers on it."""
    busy: list[tuple[int, int]]
    """When it computed."""
    gaps: list[Gap]


@dataclass(frozen=True, slots=True, order=True)
class _Reason:
    """Why a device may be idle: of those of one time the least counts."""

    rank: int
    order: int
    end_ns: int
    cause: str
    detail: str


def device_timelines(trace: ProgramTrace, limits: Mapping[str, float] | None = None) -> list[DeviceTimeline]:
    """Return the timeline of each device.

    Args:
        limits: those of a bench record's calibration, to compare copies with.
    """
    hosts = {process.host for process in trace.processes}
    by_device: defaultdict[str, list[TracedSpan]] = defaultdict(list)
    for span in trace.spans:
        if span.is_of_worker:
            host = f"{trace.processes[span.process].host}/" if len(hosts) > 1 else ""
            for device in span.facts.get("devices") or [span.facts["device"]]:
                by_device[host + str(device).rpartition("/")[2]].append(span)
    return [_timeline(trace, name, spans, limits) for name, spans in sorted(by_device.items())]


def _timeline(
    trace: ProgramTrace, name: str, spans: list[TracedSpan], limits: Mapping[str, float] | None
) -> DeviceTimeline:
    collecting = [(one.begin_ns, one.end_ns + _SAME_NS) for one in spans if one.name == "collect"]
    others = [(one.begin_ns, one.end_ns) for one in spans if kind_of(one) == COMPUTE and one.name != "collect"]
    busy = merged([*((begin, end - _SAME_NS) for begin, end in merged(collecting)), *others])
    idle = list(_between(busy))
    reasons = [*_of_workers(spans, limits), *_of_lanes(trace, spans), *_of_program(trace, spans, limits)]
    return DeviceTimeline(name, spans, busy, list(_explained(idle, reasons)))


def _between(busy: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for (_, end), (begin, _) in pairwise(busy):
        yield end, begin


_Timed = tuple[int, _Reason]
"""When it begins, and the reason."""


def _of_workers(spans: Sequence[TracedSpan], limits: Mapping[str, float] | None) -> Iterator[_Timed]:
    """Yield what the device's own workers did instead."""
    for number, span in enumerate(spans):
        if (kind := kind_of(span)) == COMPUTE:
            continue
        words = "the weight sync" if kind == SYNC else public_name(span)
        detail = described(span, limits) if kind == COPY else words
        yield span.begin_ns, _Reason(_OF_WORKER, -number, span.end_ns, words, detail)


def _of_lanes(trace: ProgramTrace, spans: Sequence[TracedSpan]) -> Iterator[_Timed]:
    """Yield what a RolloutController says about who waits for whom."""
    kinds = {str(span.facts.get("engine", "")) for span in spans}
    for number, lane in enumerate(trace.lanes):
        if lane.lane == "trainer" and lane.name in _OF_TRAINER:
            idle, words = _OF_TRAINER[lane.name]
            if idle in kinds:
                yield lane.begin_ns, _Reason(_OF_LANE, number, lane.end_ns, words, words)


def _of_program(
    trace: ProgramTrace, spans: Sequence[TracedSpan], limits: Mapping[str, float] | None
) -> Iterator[_Timed]:
    """Yield what the threads that call the device's engines did meanwhile; the innermost span counts."""
    own = {span.engine for span in spans}
    calling = {span.thread for span in trace.spans if span.is_call and span.engine in own}
    for span in (*trace.calls, *(one for one in trace.spans if one.kind == "program")):
        if span.process != 0 or span.thread not in calling:
            continue
        words = detail = _words(trace, span, own)
        if span.name == "sync_weights":
            words, detail = "the weight sync", described(span, limits)
        yield span.begin_ns, _Reason(_OF_PROGRAM, -span.depth, span.end_ns, words, detail)


def _words(trace: ProgramTrace, span: TracedSpan, own: set[int]) -> str:
    if not span.is_call:
        return PROGRAM if span.name == "step" else f"{SPAN_OF_PROGRAM}{span.name}"
    number = span.engine
    if number in own:
        return f"{WAY_TO_WORKERS} of {public_name(span)}"
    devices = ", ".join(trace.engines.get(number, {}).get("devices", []))
    return f"{public_name(span)} on {devices}" if devices else public_name(span)


def _explained(idle: Sequence[tuple[int, int]], reasons: Sequence[_Timed]) -> Iterator[Gap]:
    """Cut the idle times where their reasons change; gaps with one reason that follow each other are one."""
    coming = sorted(reasons, key=lambda one: one[0])
    begun: list[_Reason] = []
    position = 0
    for begin, end in idle:
        at, last = begin, None
        while at < end:
            while position < len(coming) and coming[position][0] <= at:
                heapq.heappush(begun, coming[position][1])
                position += 1
            while begun and begun[0].end_ns <= at:
                heapq.heappop(begun)
            until = min(end, coming[position][0]) if position < len(coming) else end
            cause, detail = PROGRAM, PROGRAM
            if begun:
                cause, detail, until = begun[0].cause, begun[0].detail, min(until, begun[0].end_ns)
            if last is not None and (last.cause, last.detail) == (cause, detail):
                last = Gap(last.begin_ns, until, cause, detail)
            else:
                if last is not None:
                    yield last
                last = Gap(at, until, cause, detail)
            at = until
        if last is not None:
            yield last
