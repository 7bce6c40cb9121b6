"""A trace in Chrome's format, which ui.perfetto.dev and chrome://tracing open: processes, threads, kernels and gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rlcore.trace.events import ProgramTrace
from rlcore.trace.gaps import DeviceTimeline
from rlcore.trace.kernels import RecordedCall
from rlcore.trace.phases import public_name

_LANES, _DEVICES, _KERNELS = 1_000_001, 1_000_002, 1_000_003
"""Numbers of what is no process: larger than those of processes may be."""


def chrome_json(trace: ProgramTrace, devices: Sequence[DeviceTimeline], calls: Sequence[RecordedCall]) -> bytes:
    """Return the JSON. Times are microseconds since the first span."""
    events = [*_names(trace, devices), *_spans(trace), *_device_events(trace, devices), *_kernels(trace, calls)]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}, enc_hook=str)


def _names(trace: ProgramTrace, devices: Sequence[DeviceTimeline]) -> Iterator[dict[str, Any]]:
    for number, process in enumerate(trace.processes):
        role = "program" if number == 0 else "worker process"
        yield _name("process_name", number, 0, f"{role} {process.pid} on {process.host}")
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for thread, name in process.threads.items():
            yield _name("thread_name", number, thread, name)
    yield _name("process_name", _LANES, 0, "rollout")
    yield _name("process_name", _DEVICES, 0, "devices")
    yield _name("process_name", _KERNELS, 0, "kernels of recorded calls")
    for number, device in enumerate(devices):
        yield _name("thread_name", _DEVICES, number, device.name)
    for number, lane in enumerate(_lanes(trace)):
        yield _name("thread_name", _LANES, number, lane)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _lanes(trace: ProgramTrace) -> list[str]:
    return sorted({lane.lane for lane in trace.lanes})


def _spans(trace: ProgramTrace) -> Iterator[dict[str, Any]]:
    for span in trace.spans:
        facts = span.facts | ({"unfinished": True} if span.is_unfinished else {})
        yield _event(trace, public_name(span), (span.begin_ns, span.end_ns), (span.process, span.thread), facts)
    lanes = {name: number for number, name in enumerate(_lanes(trace))}
    for lane in trace.lanes:
        yield _event(trace, lane.name, (lane.begin_ns, lane.end_ns), (_LANES, lanes[lane.lane]), {})


def _device_events(trace: ProgramTrace, devices: Sequence[DeviceTimeline]) -> Iterator[dict[str, Any]]:
    for number, device in enumerate(devices):
        for begin, end in device.busy:
            yield _event(trace, "computes", (begin, end), (_DEVICES, number), {})
        for gap in device.gaps:
            name = f"waits for {gap.detail}"
            yield _event(trace, name, (gap.begin_ns, gap.end_ns), (_DEVICES, number), {"cause": gap.cause})


def _kernels(trace: ProgramTrace, calls: Sequence[RecordedCall]) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(calls):
        for begin, end, name in call.intervals:
            yield _event(trace, name, (begin, end), (_KERNELS, number), {})


def _event(
    trace: ProgramTrace, name: str, times: tuple[int, int], row: tuple[int, int], facts: dict[str, Any]
) -> dict[str, Any]:
    begin_ns, end_ns = times
    process, thread = row
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": (begin_ns - trace.begin_ns) / 1e3,
        "dur": max(0, end_ns - begin_ns) / 1e3,
        "args": facts,
    }
