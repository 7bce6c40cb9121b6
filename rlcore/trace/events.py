"""The spans of a traced program, read from the files of its processes and put on one clock."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rlcore.errors import InvalidInputError
from rlcore.settings import TRACE_FILES
from rlcore.spans import SCHEMA


@dataclass(eq=False, slots=True)
class TracedSpan:
    """Something that a thread of a process did. Times are nanoseconds of the program's CLOCK_MONOTONIC."""

    name: str
    begin_ns: int
    end_ns: int
    process: int
    """The position of its process in ``ProgramTrace.processes``."""
    thread: int
    depth: int
    """The number of spans of this thread that it lies in."""
    kind: str
    """One of ``rlcore.spans.Kind``."""
    facts: dict[str, Any]
    is_unfinished: bool = False
    """Its process ended before it did."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def is_of_worker(self) -> bool:
        return self.kind == "worker"

    @property
    def is_call(self) -> bool:
        """The program asks it of an engine."""
        return self.kind == "call"

    @property
    def engine(self) -> int:
        """The number of the engine; 0 for what is about several or none."""
        return int(self.facts.get("number", 0)) if self.kind != "program" else 0


@dataclass(eq=False, slots=True)
class LaneSpan:
    """Something that a part of the program did, such as "sampler 0", whichever its thread."""

    lane: str
    name: str
    begin_ns: int
    end_ns: int


@dataclass(eq=False, slots=True)
class Process:
    """A process that wrote spans."""

    host: str
    pid: int
    command: list[str]
    boot: str
    monotonic_ns: int
    utc_ns: int
    threads: dict[int, str] = field(default_factory=dict)
    engines: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Facts about the engines that it has built, by number."""
    clocks: list[dict[str, Any]] = field(default_factory=list)
    """How far the clocks of other hosts were ahead of this one's."""


@dataclass(eq=False)
class ProgramTrace:
    """All that the processes of a program noted. What is computed of it, is once: a trace may have many spans."""

    processes: list[Process]
    """The program is the first."""
    spans: list[TracedSpan]
    """In the order in which they began."""
    lanes: list[LaneSpan]
    notes: list[str]
    """Words for the reader of the trace, such as about damaged lines."""

    @cached_property
    def begin_ns(self) -> int:
        return min([*(span.begin_ns for span in self.spans), *(lane.begin_ns for lane in self.lanes)], default=0)

    @cached_property
    def end_ns(self) -> int:
        return max([*(span.end_ns for span in self.spans), *(lane.end_ns for lane in self.lanes)], default=0)

    @property
    def engines(self) -> dict[int, dict[str, Any]]:
        return self.processes[0].engines

    @cached_property
    def calls(self) -> list[TracedSpan]:
        """All that the program asked of its engines; what is a part of another call is left out."""
        found: list[TracedSpan] = []
        until: dict[tuple[int, int], int] = {}
        for span in self.spans:
            thread = span.process, span.thread
            if span.is_call and span.begin_ns >= until.get(thread, 0):
                until[thread] = span.end_ns
                found.append(span)
        return found


class _TraceLine(msgspec.Struct):
    """One line of a file, of whichever kind: the header, a thread, a begin, an end, a lane or an event."""

    schema: str | None = None
    host: str = ""
    pid: int = 0
    command: list[str] = []
    boot: str = ""
    monotonic_ns: int = 0
    utc_ns: int = 0
    thread: int = 0
    name: str = ""
    kind: str = "program"
    begin: str | None = None
    at: int = 0
    end: int | None = None
    lane: str | None = None
    event: str | None = None
    facts: dict[str, Any] = {}


_decode = msgspec.json.Decoder(_TraceLine).decode


def read_trace(folder: Path) -> ProgramTrace:
    """Read what the processes of a program wrote into ``folder``, whether they have ended well, were killed, or run.

    Raises:
        InvalidInputError: there is no such file, or none of them is of this version.
    """
    found = [one for path in sorted(folder.glob(TRACE_FILES)) if (one := _read_file(path)) is not None]
    if not found:
        raise InvalidInputError(
            f"{folder} holds no trace: no file {TRACE_FILES} of {SCHEMA} is there; give the folder that `rlcore trace` "
            "or rlcore.init(trace=) wrote"
        )
    # Workers start after their program, and may be on hosts whose clocks are ahead.
    found.sort(key=lambda one: (not one.process.engines, one.process.utc_ns))
    trace = ProgramTrace([one.process for one in found], [], [], [])
    for number, one in enumerate(found):
        if one.num_damaged:
            trace.notes.append(f"{one.path.name}: {one.num_damaged} damaged lines were left out")
        shift_ns = _shift_ns(trace.processes[0], one.process, trace.notes)
        for span in one.spans:
            span.process, span.begin_ns, span.end_ns = number, span.begin_ns + shift_ns, span.end_ns + shift_ns
        for lane in one.lanes:
            lane.begin_ns, lane.end_ns = lane.begin_ns + shift_ns, lane.end_ns + shift_ns
        trace.spans += one.spans
        trace.lanes += one.lanes
    trace.spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
    _end_open_spans(trace)
    _tell_workers(trace)
    return trace


@dataclass(eq=False, slots=True)
class _File:
    path: Path
    process: Process
    spans: list[TracedSpan] = field(default_factory=list)
    lanes: list[LaneSpan] = field(default_factory=list)
    num_damaged: int = 0


def _read_file(path: Path) -> _File | None:
    """Return what a process wrote; None where its first line, which says so, is not there."""
    lines = path.read_bytes().split(b"\n")
    try:
        head = _decode(lines[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if head.schema != SCHEMA:
        return None
    file = _File(path, Process(head.host, head.pid, head.command, head.boot, head.monotonic_ns, head.utc_ns))
    open_spans: defaultdict[int, list[TracedSpan]] = defaultdict(list)
    for data in lines[
        1:-1
    ]:  # what comes after the last end of a line is none, or was cut off by the end of the process
        try:
            _take(file, open_spans, _decode(data))
        except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError):
            file.num_damaged += 1
    return file


def _take(file: _File, open_spans: defaultdict[int, list[TracedSpan]], line: _TraceLine) -> None:
    process = file.process
    if line.lane is not None:
        file.lanes.append(LaneSpan(line.lane, line.name, line.at, line.end or line.at))
    elif line.begin is not None:
        outer = open_spans[line.thread]
        span = TracedSpan(line.begin, line.at, -1, 0, line.thread, len(outer), line.kind, line.facts)
        outer.append(span)
        file.spans.append(span)
    elif line.event == "engine":
        process.engines[int(line.facts.get("number", 0))] = line.facts
    elif line.event == "clock":
        process.clocks.append(line.facts | {"ahead_ns": int(line.facts["ahead_ns"])})
    elif line.end is not None:
        span = open_spans[line.thread].pop()
        span.end_ns = line.end
        span.facts = span.facts | line.facts
    elif line.thread:
        process.threads[line.thread] = line.name


def _shift_ns(program: Process, process: Process, notes: list[str]) -> int:
    """Return what is added to the times of a process to have the program's."""
    if process.boot == program.boot:
        return 0
    for clock in program.clocks:
        if clock.get("boot") == process.boot:
            return -int(clock["ahead_ns"])
    notes.append(
        f"the clock of {process.host} was not compared with that of {program.host}: the times of process {process.pid} "
        "are by the two hosts' times of day, which may differ by milliseconds"
    )
    return (process.utc_ns - process.monotonic_ns) - (program.utc_ns - program.monotonic_ns)


def _end_open_spans(trace: ProgramTrace) -> None:
    """Let spans that never ended last until the last thing that their process noted."""
    last: defaultdict[int, int] = defaultdict(int)
    for span in trace.spans:
        last[span.process] = max(last[span.process], span.begin_ns, span.end_ns)
    for span in trace.spans:
        if span.end_ns < span.begin_ns:
            span.end_ns, span.is_unfinished = last[span.process], True


def _tell_workers(trace: ProgramTrace) -> None:
    """Give the spans of workers the facts about the program's call that they belong to, such as the tag that moves."""
    calls: defaultdict[tuple[int, str], list[TracedSpan]] = defaultdict(list)
    for span in trace.spans:
        if span.is_call:
            calls[span.engine, span.name].append(span)
    begins = {key: [span.begin_ns for span in found] for key, found in calls.items()}
    for span in trace.spans:
        if span.is_of_worker:
            key = span.engine, span.name
            at = bisect.bisect_right(begins.get(key, []), (span.begin_ns + span.end_ns) // 2) - 1
            if at >= 0:
                span.facts = calls[key][at].facts | span.facts


def merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def length_ns(intervals: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in intervals)
