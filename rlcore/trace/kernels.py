"""The kernels of one call, as torch's profiler recorded them: how long the device had any, and which took most."""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlcore.trace.events import ProgramTrace, TracedSpan, length_ns, merged

_OF_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_NUM_SHOWN = 12


class _Event(msgspec.Struct):
    """An event of a Chrome trace, as far as it is read here; ``ts`` and ``dur`` are microseconds."""

    name: Any = ""
    cat: Any = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: Any = 0
    tid: Any = 0
    ph: str = ""


class _Recording(msgspec.Struct):
    traceEvents: list[_Event] = []


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call whose kernels were recorded. Recording makes it slower: its seconds are not those of other calls."""

    span: TracedSpan
    is_of_host: bool
    """There were no kernels of a device: the operators of the host are shown."""
    intervals: list[tuple[int, int, str]]
    """Begin and end of each kernel in nanoseconds of the program's clock, and its name."""
    top: list[Kernel]
    """The kernels that took most time."""

    @property
    def busy_share(self) -> float:
        """The share of the call in which the device had a kernel or a copy."""
        busy = merged((max(begin, self.span.begin_ns), min(end, self.span.end_ns)) for begin, end, _ in self.intervals)
        return length_ns(busy) / max(1, self.span.end_ns - self.span.begin_ns)


def recorded_calls(folder: Path, trace: ProgramTrace) -> list[RecordedCall]:
    """Return the calls of which the profiler's file is there and whole; notes say which is not."""
    found = []
    for span in trace.spans:
        if span.is_of_worker and (name := span.facts.get("kernels")):
            path = folder / Path(str(name)).name
            try:
                found.append(_recorded(span, _read(path)))
            except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
                trace.notes.append(f"{path.name}, the kernels of a call of {span.name}, cannot be read: {error}")
    return found


def _read(path: Path) -> list[_Event]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return msgspec.json.decode(data, type=_Recording).traceEvents


def _recorded(span: TracedSpan, events: list[_Event]) -> RecordedCall:
    whole = f"{span.name} of {span.facts['engine']}"
    own = _range_of(events, whole)
    # The range begins at once after the span: so many nanoseconds is the profiler's clock behind the program's.
    shift_ns = span.begin_ns - own.ts * 1e3
    kernels = [one for one in events if one.cat in _OF_DEVICE and one.ph == "X"]
    is_of_host = not kernels
    each = (
        list(_own_times([one for one in events if one.cat == "cpu_op"]))
        if is_of_host
        else [(one, one.dur) for one in kernels]
    )
    counts: defaultdict[str, list[float]] = defaultdict(list)
    for event, own_us in each:
        counts[str(event.name)].append(own_us / 1e6)
    top = sorted((Kernel(name, len(times), sum(times)) for name, times in counts.items()), key=lambda one: -one.seconds)
    intervals = [
        (round(one.ts * 1e3 + shift_ns), round((one.ts + one.dur) * 1e3 + shift_ns), str(one.name)) for one, _ in each
    ]
    return RecordedCall(span, is_of_host, sorted(intervals), top[:_NUM_SHOWN])


def _range_of(events: Iterable[_Event], name: str) -> _Event:
    for one in events:
        if one.cat == "user_annotation" and one.name == name:
            return one
    raise LookupError(f"it has no range {name!r}")


def _own_times(operators: Iterable[_Event]) -> Iterator[tuple[_Event, float]]:
    """Yield each operator of the host with its own time, without that of operators that it called."""
    by_thread: defaultdict[Any, list[_Event]] = defaultdict(list)
    for one in operators:
        by_thread[one.tid].append(one)
    for found in by_thread.values():
        found.sort(key=lambda one: (one.ts, -one.dur))
        outer: list[list[Any]] = []
        for one in found:
            while outer and outer[-1][0].ts + outer[-1][0].dur <= one.ts:
                event, left = outer.pop()
                yield event, left
            if outer:
                outer[-1][1] -= one.dur
            outer.append([one, one.dur])
        for event, left in outer:
            yield event, left
