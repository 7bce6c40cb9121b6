"""The page of a trace: tables, and a timeline that is zoomed and moved. It loads nothing, and all text is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.bench.reports import text
from rlcore.errors import MissingDependencyError
from rlcore.trace.events import TracedSpan, merged
from rlcore.trace.phases import GENERATES, described, kind_of, public_name

if TYPE_CHECKING:
    from rlcore.trace.report import Report

_TEMPLATE = Path(__file__).with_name("page.html.j2")
_MOST_BARS = 40_000
"""The most bars of a row: a browser draws so many at once. Shorter ones are left out first."""
_PROGRAM_DEPTH = 3


def render(report: Report) -> str:
    """Return the page; raises MissingDependencyError without jinja2, which torch brings."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("jinja2", needed_for="the page of a trace", extra="bench") from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    trace = report.trace
    rows = [{"name": name, "bars": _fitting(bars)} for name, bars in _rows(report)]
    begin = trace.begin_ns
    data = {
        "seconds": (trace.end_ns - begin) / 1e9,
        "steps": [[(first - begin) / 1e9, (last - begin) / 1e9] for first, last in report.steps.measured],
        "rows": rows,
    }
    return environment.from_string(_TEMPLATE.read_text()).render(
        title=report.title,
        facts=_facts(report),
        tables=report.tables,
        notes=report.notes,
        data=_in_script(data),
    )


def _in_script(data: Any) -> Any:
    """Return JSON that ends no script and begins no comment, whatever is in its strings."""
    from markupsafe import Markup

    packed = json.dumps(data, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        packed = packed.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(packed)


def _facts(report: Report) -> dict[str, str]:
    trace = report.trace
    hosts = sorted({process.host for process in trace.processes})
    return {
        "hosts": ", ".join(hosts),
        "processes": str(len(trace.processes)),
        "devices": ", ".join(device.name for device in report.devices) or "none",
        "time": text.seconds((trace.end_ns - trace.begin_ns) / 1e9),
        "spans": str(len(trace.spans) + len(trace.lanes)),
    }


_Bar = tuple[float, float, str, str, str]
"""Begin, end, kind (a colour), name, and what is said when the pointer is over it."""


def _rows(report: Report) -> Iterator[tuple[str, list[_Bar]]]:
    trace, start = report.trace, report.trace.begin_ns
    program = [span for span in trace.spans if span.process == 0 and not span.is_of_worker]
    threads = dict.fromkeys(span.thread for span in program)
    for thread in threads:
        for depth in range(_PROGRAM_DEPTH):
            own = [span for span in program if (span.thread, span.depth) == (thread, depth)]
            if own:
                name = trace.processes[0].threads.get(thread, str(thread))
                yield f"program, {name}" + (f" ({depth + 1})" if depth else ""), [_bar(start, span) for span in own]
    for lane in dict.fromkeys(one.lane for one in trace.lanes):
        yield (
            lane,
            [
                _times(start, (one.begin_ns, one.end_ns), _LANE_KINDS.get(one.name, "other"), one.name, one.name)
                for one in trace.lanes
                if one.lane == lane
            ],
        )
    for device in report.devices:
        yield f"{device.name}: calls", [_bar(start, span) for span in device.spans]
        gaps = [
            _times(start, (gap.begin_ns, gap.end_ns), "gap", gap.cause, f"waits for {gap.detail}")
            for gap in device.gaps
        ]
        busy = [_times(start, (begin, end), "compute", "", "computes") for begin, end in device.busy]
        yield f"{device.name}: idle, and why", sorted([*gaps, *busy])
    for call in report.kernels:
        name = f"{public_name(call.span)}: {'operators' if call.is_of_host else 'kernels'}"
        if call.is_of_host:
            found = [
                (begin, end, "host", "operators of the host")
                for begin, end in merged((b, e) for b, e, _ in call.intervals)
            ]
        else:
            found = [(begin, end, "kernel", kernel) for begin, end, kernel in call.intervals]
        yield name, [_times(start, (begin, end), kind, what[:120], what[:400]) for begin, end, kind, what in found]


_LANE_KINDS = {"generate": "generate", "train": "compute", "sync": "sync", "wait": "gap", "evaluate": "gap"}


def _bar(start: int, span: TracedSpan) -> _Bar:
    kind = "generate" if span.name in GENERATES else kind_of(span)
    said = f"{described(span)}{' (never ended: its process did)' if span.is_unfinished else ''}"
    return _times(start, (span.begin_ns, span.end_ns), kind, public_name(span), said)


def _times(start: int, times: tuple[int, int], kind: str, name: str, said: str) -> _Bar:
    begin_ns, end_ns = times
    begin, end = round((begin_ns - start) / 1e9, 6), round((end_ns - start) / 1e9, 6)
    return begin, end, kind, name, f"{said}, {text.seconds((end_ns - begin_ns) / 1e9)}"


def _fitting(bars: list[_Bar]) -> list[_Bar]:
    if len(bars) <= _MOST_BARS:
        return bars
    kept = sorted(bars, key=lambda bar: bar[0] - bar[1])[:_MOST_BARS]
    return sorted(kept)
