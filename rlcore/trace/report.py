"""The report of a trace: tables, ``trace.json`` for Perfetto, and ``trace.html``, a page that needs nothing else."""

from __future__ import annotations

import bisect
import itertools
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcore.atomic import write_file
from rlcore.bench import record
from rlcore.bench.reports import text
from rlcore.cli.console import aligned
from rlcore.errors import InvalidInputError
from rlcore.trace.advice import Advice, advice
from rlcore.trace.chrome import chrome_json
from rlcore.trace.events import ProgramTrace, TracedSpan, read_trace
from rlcore.trace.gaps import DeviceTimeline, Gap, device_timelines
from rlcore.trace.kernels import RecordedCall, recorded_calls
from rlcore.trace.phases import MeasuredSteps, public_name

JSON, PAGE = "trace.json", "trace.html"
_BEGINNINGS = {JSON: b'"args":{"name":"program ', PAGE: b"<title>rlcore trace: "}
"""Text in the first thousand bytes of the files that a report has written, and of no others."""
_MOST_ROWS = 12
_SHORT = 0.001
"""Shares below it are told together."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that a trace says."""

    title: str
    trace: ProgramTrace
    steps: MeasuredSteps
    devices: list[DeviceTimeline]
    kernels: list[RecordedCall]
    tables: list[Table]
    notes: list[str]


def make_report(folder: Path, record_path: Path | None = None) -> Report:
    """Read a trace, write its page and its JSON into its folder, and return what they say.

    Args:
        record_path: a bench record of this machine: copies and computations are compared with its limits.

    Raises:
        InvalidInputError: the folder holds no trace, or files that are not of its report, or the record no limits; or
            the folder cannot be written.
        BenchError: the record cannot be read.
    """
    from rlcore.trace.page import render

    check_pages(folder)
    limits = None if record_path is None else _limits(record_path)
    trace = read_trace(folder)
    found = _report(trace, recorded_calls(folder, trace), limits)
    try:
        write_file(folder / JSON, chrome_json(trace, found.devices, found.kernels))
        write_file(folder / PAGE, render(found).encode())
    except OSError as error:
        raise InvalidInputError(f"the report cannot be written into {folder}: {error.strerror}") from error
    return found


def check_pages(folder: Path) -> None:
    """Raise InvalidInputError if a file of the folder that a report would replace was not written by one."""
    for name, beginning in _BEGINNINGS.items():
        try:
            with (folder / name).open("rb") as file:
                is_own = beginning in file.read(1000)
        except (FileNotFoundError, NotADirectoryError):  # there is no such file, or no folder
            continue
        except OSError as error:
            raise InvalidInputError(f"the report cannot be written into {folder}: {name}: {error.strerror}") from error
        if not is_own:
            raise InvalidInputError(
                f"{folder / name} was not written by rlcore trace, and its report would replace it; give another "
                "folder, or move that file"
            )


def _limits(path: Path) -> Mapping[str, float]:
    calibration = record.read(path).calibration
    if calibration is None or not calibration.limits:
        raise InvalidInputError(
            f"{path} has no limits of its machine; give a record with a calibration, as `rlcore bench run` makes it"
        )
    return calibration.limits


def _report(trace: ProgramTrace, kernels: list[RecordedCall], limits: Mapping[str, float] | None) -> Report:
    steps, devices = MeasuredSteps(trace), device_timelines(trace, limits)
    tables = [
        _phases(trace, steps),
        *(_idle(device, steps) for device in devices),
    ]
    if found := advice(trace, steps, devices, limits):
        tables.append(_faster(found, steps, limits))
    tables += [_kernels(call) for call in kernels]
    program = trace.processes[0]
    notes = [*trace.notes, *_killed(trace)]
    return Report(shlex.join(program.command), trace, steps, devices, kernels, tables, notes)


def _killed(trace: ProgramTrace) -> Iterator[str]:
    """Say which processes have ended amid something."""
    innermost = {span.process: span for span in trace.spans if span.is_unfinished}
    for number, span in innermost.items():
        process = trace.processes[number]
        role = "the program" if number == 0 else "worker process"
        where = f" on {span.facts['device']}" if "device" in span.facts else ""
        yield f"{role} {process.pid} ended, or goes on, amid {public_name(span)}{where}; what it did before is shown"


def _about(steps: MeasuredSteps) -> str:
    if not steps.are_known:
        return "the whole program: no step was found; mark yours with rlcore.span('step')"
    left_out = len(steps.all) - len(steps.measured)
    others = f"; {left_out} are left out, which warm up or record kernels" if left_out else ""
    return f"a mean step of {text.seconds(steps.seconds)}, over {len(steps.measured)} steps{others}"


def _phases(trace: ProgramTrace, steps: MeasuredSteps) -> Table:
    """Where the time of the program goes: its calls, the rest, and what of the rest it has named itself."""
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for span in trace.calls:
        name = public_name(span)
        seconds[name] += steps.share(span.begin_ns, span.end_ns)
        if steps.has(span):
            counts[name] += 1
            moved[name] += int(span.facts.get("bytes", 0))
    rest_s = max(0.0, steps.seconds - sum(seconds.values()))
    named: defaultdict[str, float] = defaultdict(float)
    for span in trace.spans:
        if span.kind == "program" and span.name != "step":
            named[f"of that: {span.name}"] += steps.share(span.begin_ns, span.end_ns) - _calls_inside(
                trace, steps, span
            )
            counts[f"of that: {span.name}"] += int(steps.has(span))
    ordered = [*_by_time(seconds), ("outside the engines' calls", rest_s), *_by_time(named)]
    rows = [
        [
            name,
            f"{counts[name] / len(steps.measured):.3g}" if counts[name] else "",
            text.seconds(found),
            f"{found / steps.seconds:.1%}",
            text.rate(moved[name] / len(steps.measured), "B") if moved[name] else "",
        ]
        for name, found in ordered
        if found > _SHORT * steps.seconds
    ]
    return Table("Where a step's time goes", ["phase", "calls", "time", "share", "moved"], rows, _about(steps))


def _by_time(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda one: -one[1])


def _calls_inside(trace: ProgramTrace, steps: MeasuredSteps, span: TracedSpan) -> float:
    """Return the seconds of a step that the calls take which a thread makes inside a span of the program's."""
    first = bisect.bisect_left(trace.calls, span.begin_ns, key=lambda call: call.begin_ns)
    inside = itertools.takewhile(lambda call: call.begin_ns < span.end_ns, itertools.islice(trace.calls, first, None))
    own = [call for call in inside if (call.process, call.thread) == (span.process, span.thread)]
    return sum(steps.share(call.begin_ns, call.end_ns) for call in own)


def _idle(device: DeviceTimeline, steps: MeasuredSteps) -> Table:
    sums: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    longest: dict[str, Gap] = {}
    for gap in device.gaps:
        if (share := steps.share(gap.begin_ns, gap.end_ns)) > 0:
            sums[gap.cause] += share
            counts[gap.cause] += 1
            if gap.cause not in longest or gap.seconds > longest[gap.cause].seconds:
                longest[gap.cause] = gap
    busy_s = sum(steps.share(begin, end) for begin, end in device.busy)
    ordered = sorted(sums, key=lambda cause: -sums[cause])
    rows = [
        [
            f"waits for {longest[cause].detail}",
            f"{counts[cause] / len(steps.measured):.3g}",
            text.seconds(sums[cause]),
            f"{sums[cause] / steps.seconds:.1%}",
            text.seconds(longest[cause].seconds),
        ]
        for cause in ordered[:_MOST_ROWS]
    ]
    note = f"it computes in {busy_s / steps.seconds:.1%} of a step; the words are of the longest gap of each kind"
    return Table(f"Why {device.name} is idle", ["cause", "gaps", "time", "share", "longest"], rows, note)


def _faster(found: list[Advice], steps: MeasuredSteps, limits: Mapping[str, float] | None) -> Table:
    rows = [
        [
            one.what,
            text.seconds(one.seconds),
            "n/a" if one.best_s is None else text.seconds(one.best_s) if one.best_s else "0",
            f"{one.saved_s / steps.seconds:.1%}" if one.best_s is not None else "n/a",
            one.how,
        ]
        for one in found[:_MOST_ROWS]
    ]
    note = "each row alone; they do not add up"
    if limits is None:
        note += ". n/a: no limits are known; give the record of `rlcore bench run` of this machine with --record"
    header = ["what", "now", "at best", "saves of the step", "how"]
    return Table("What would make this step faster", header, rows, note)


def _kernels(call: RecordedCall) -> Table:
    span, total = call.span, sum(one.seconds for one in call.top) or 1.0
    what = "operators of the host" if call.is_of_host else "kernels"
    rows = [
        [one.name[:160], str(one.count), text.seconds(one.seconds), f"{one.seconds / total:.1%}"] for one in call.top
    ]
    note = f"{what} had {call.busy_share:.1%} of this call of {text.seconds(span.seconds)}, which recording made slower"
    where = span.facts.get("device", "")
    return Table(f"{public_name(span)} on {where}: {what}", ["name", "count", "time", "of these"], rows, note)


def text_of(report: Report, folder: Path) -> str:
    """Return the tables as lines of text."""
    lines = []
    for table in report.tables:
        lines += [table.title, f"  ({table.note})" if table.note else ""]
        lines += [*(f"  {line}" for line in aligned([table.header, *table.rows])), ""]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"{folder / PAGE}: open it in a browser; {folder / JSON}: in ui.perfetto.dev")
    return "\n".join(lines)
