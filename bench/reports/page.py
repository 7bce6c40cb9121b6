"""One HTML page about one run or several: self-contained, readable in 30 seconds.

The answers come first (``answers.py``): how fast is this machine for reinforcement learning, what limits it, how do
machines compare. Then comes what stands behind them: a step by phase, shares of limits, peers, curves by size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlcore.bench.compare import NOTES, compare, what_differs
from rlcore.bench.record import CaseResult, Record
from rlcore.bench.reports import charts
from rlcore.bench.reports.answers import NOT_MEASURED, PHASES, ReportRun, answers
from rlcore.bench.reports.summary import (
    PeerComparison,
    is_floor,
    is_ours,
    median,
    p10_p90,
    peak,
    peer_comparisons,
    share_of_limit,
    times,
    unit,
)
from rlcore.bench.reports.tables import ResultTable, compared_table, missing_table, targets_table
from rlcore.bench.reports.text import rate, seconds, words
from rlcore.errors import MissingDependencyError

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(runs: Sequence[ReportRun]) -> str:
    """Return the page; raises MissingDependencyError without jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("jinja2", needed_for="the report", extra="bench") from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(
        runs=[(f"{run.name}: {run.record.device_name}", _facts(run.record)) for run in runs],
        title=", ".join(run.name for run in runs),
        answers=answers(runs),
        absent=NOT_MEASURED,
        has_step=any(run.step for run in runs),
        steps=[_step(run, step) for run in runs if (step := run.step)],
        phase_names=[*map(words, PHASES), "the rest"],
        shares=[group for run in runs if (group := shares(run)).bars],
        peers=[work for run in runs for work in peer_groups(run, is_alone=len(runs) == 1)],
        targets=[(run.name, targets_table(run.record)) for run in runs],
        charts=_curves(runs),
        frame=charts,
        versus=[pair for run in runs[1:] if (pair := _versus(runs[0], run))["table"].rows],
        limits=_limits(runs),
        missing=[
            (run.name, len(run.record.cases) - len(run.record.passed()), missing_table(run.record)) for run in runs
        ],
        caveats=_caveats(runs),
    )


def _facts(record: Record) -> dict[str, str]:
    system = record.system
    return {
        "devices": str(system.accelerators_per_node or "the host itself"),
        "host": f"{system.host}, {system.host_memory_capacity_bytes / 2**30:.0f} GiB",
        "software": ", ".join(record.software()),
        "rlcore": f"{record.rlcore}, commit {record.commits()}",
        **{words(name): note for name in NOTES if (note := getattr(system, name))},
        "measured": f"{record.started_at[:16].replace('T', ' ')} UTC, {record.effort} run, {_counts(record)}",
    }


def _counts(record: Record) -> str:
    """Return the numbers of results, such as "20 results, 7 blocked, 70 skipped"."""
    statuses = Counter(result.status for result in record.cases)
    others = [f"{statuses[status]} {status}" for status in ("fail", "oom", "blocked", "skipped") if statuses[status]]
    return ", ".join([f"{statuses['pass']} results", *others])


# -------------------------------------------------------------------------------- what stands behind the answers


def _step(run: ReportRun, step: CaseResult) -> dict[str, Any]:
    """Return a step of RL as a bar of its phases."""
    total = median(step, "time")
    parts = {words(name): median(step, name) for name in PHASES}
    parts["the rest"] = max(0.0, total - sum(parts.values()))
    params = step.params
    return {
        "title": f"{run.name}: {seconds(total)} a step",
        "shares": [part / (sum(parts.values()) or 1.0) for part in parts.values()],
        "text": ", ".join(f"{name} {seconds(part)}" for name, part in parts.items() if part > 0),
        "model": f"{params.get('model')}, {params.get('prompts')} prompts, {params.get('samples')} samples",
    }


class _Bar(NamedTuple):
    label: str
    detail: str
    share: float
    """The part of the width that it takes."""
    value: str
    is_ours: bool
    marks: str


class _BarGroup(NamedTuple):
    title: str
    bars: list[_Bar]
    summary: str = ""


def shares(run: ReportRun) -> _BarGroup:
    """Return the best result of each case and limit: rlcore's where it has one; never one that computes nothing."""
    passed = run.record.passed()
    with_ours = {result.name for result in passed if is_ours(result)}
    best: dict[tuple[str, str], tuple[float, CaseResult]] = {}
    for result in passed:
        share = share_of_limit(result, run.record.calibration)
        if share is None or is_floor(result) or (result.name in with_ours and not is_ours(result)):
            continue
        if share.value > best.get((result.name, share.limit), (0.0, result))[0]:
            best[result.name, share.limit] = share.value, result
    bars = [
        _Bar(
            label=name,
            detail=f"{result.implementation}, of {limit}",
            share=value,
            value=f"{value:.0%}" if value >= 0.1 else f"{value:.1%}",
            is_ours=False,
            marks=", ".join(result.kinds_of_marks()),
        )
        for (name, limit), (value, result) in sorted(best.items())
    ]
    return _BarGroup(run.name, bars)


def peer_groups(run: ReportRun, *, is_alone: bool) -> list[_BarGroup]:
    """Return a group of bars for each work that peers did too. ``is_alone``: the page has no other run."""
    found = peer_comparisons(run.record)
    where = "" if is_alone else f" on {run.name}"
    return [
        _BarGroup(f"{work.case}{where}{_own_sizes(work, found)}", _peer_bars(work.results), _peer_summary(work))
        for work in found
    ]


def _own_sizes(work: PeerComparison, every: Sequence[PeerComparison]) -> str:
    """Return the sizes that distinguish a work from the others of its case."""
    others = [one.results[0].params for one in every if one.case == work.case]
    params = work.results[0].params.items()
    own = [f"{name} {value}" for name, value in params if any(one.get(name) != value for one in others)]
    return f" ({', '.join(own)})" if own else ""


def _peer_summary(work: PeerComparison) -> str:
    """Compare the best of rlcore with the best of the others."""
    ours, theirs, floor = work.ours, work.theirs, work.floor
    shown = [f"{side.implementation} {seconds(side.seconds)}" for side in (ours, theirs) if side]
    if ours and theirs:
        shown[-1] += f": {theirs.seconds / ours.seconds:.2f}x"
    return " against ".join(shown) + (f" (floor: {floor.implementation} {seconds(floor.seconds)})" if floor else "")


def _peer_bars(results: list[CaseResult]) -> list[_Bar]:
    ordered = sorted(results, key=median)
    fastest, slowest = median(ordered[0]), median(ordered[-1])
    return [
        _Bar(
            label=result.implementation,
            detail="p10 {}, p90 {}".format(*map(seconds, p10_p90(times(result)))),
            share=median(result) / slowest,
            value=f"{seconds(median(result))}, {median(result) / fastest:.2f}x",
            is_ours=is_ours(result),
            marks=", ".join(result.kinds_of_marks()),
        )
        for result in ordered
    ]


def _product_rate(result: CaseResult) -> float | None:
    flops = next((amount for limit, amount in result.limits.items() if limit.startswith("product/")), None)
    return None if flops is None else flops / median(result)


def _bus_bandwidth(result: CaseResult) -> float | None:
    return median(result, "bus_bandwidth") if result.has("bus_bandwidth") else None


_Value = Callable[[CaseResult], float | None]
_CURVES: tuple[tuple[str, str, tuple[str, str], str, _Value], ...] = (
    ("product/sweep", "Matrix products", ("K", "inner dimension"), "FLOP/s", _product_rate),
    ("attention", "Attention", ("L", "sequence length"), "FLOP/s", _product_rate),
    ("collectives", "Collectives, bus bandwidth", ("bytes", "bytes"), "B/s", _bus_bandwidth),
    ("collectives", "Collectives, latency", ("bytes", "bytes"), "s", lambda result: median(result, "time")),
)


def _curves(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """Lines by size, of every run that has two points or more."""
    found = []
    for case, title, (x, x_title), y_title, value in _CURVES:
        lines = [line for run in runs for line in _lines(run, case, x, value, is_alone=len(runs) == 1)]
        if lines:
            found.append({"title": title, "x": x_title, "y": y_title, **charts.curves(lines)._asdict()})
    return found


def _lines(run: ReportRun, case: str, x: str, value: _Value, *, is_alone: bool) -> list[charts.Line]:
    """Return a line for each case under ``case``, or each dtype; cases of plugins may lack what a curve shows."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result in run.record.passed():
        if not f"{result.name}/".startswith(f"{case}/"):
            continue
        kind = str(result.params.get("dtype", "")) if result.name == case else result.name.removeprefix(f"{case}/")
        size, y = result.params.get(x), value(result)
        if isinstance(size, (int, float)) and size > 0 and y is not None:
            points.setdefault(words(kind), []).append((float(size), y))
    named = {kind if is_alone else f"{kind}, {run.name}": found for kind, found in points.items() if len(found) > 1}
    return [charts.Line(name, found) for name, found in named.items()]


# ------------------------------------------------------------------------------- comparisons, limits, caveats


def _versus(first: ReportRun, other: ReportRun) -> dict[str, Any]:
    """Ratios of every result that both have."""
    found = compare(first.record, other.record, names=(first.name, other.name))
    table = compared_table(found).only("case", "implementation", "sizes", "ratio", "99 % interval", "verdict")
    table = table._replace(rows=[row for row in table.rows if row[3]])
    return {"first": first.name, "other": other.name, "statement": found.statement, "table": table}


def _limits(runs: Sequence[ReportRun]) -> ResultTable:
    names = dict.fromkeys(name for run in runs if run.record.calibration for name in run.record.calibration.limits)
    rows = [[name, *(_limit(run, name) for run in runs)] for name in names]
    return ResultTable(["limit", *(run.name for run in runs)], rows)


def _limit(run: ReportRun, name: str) -> str:
    """Return what was measured, and what the datasheet says."""
    calibration = run.record.calibration
    if calibration is None or name not in calibration.limits:
        return "n/a"
    value, sheet = calibration.limits[name], peak(run.record.system, name)
    datasheet = (
        f"; datasheet {rate(sheet.value, unit(name))} ({value / sheet.value:.0%})" if sheet else "; datasheet n/a"
    )
    return rate(value, unit(name)) + datasheet


def _caveats(runs: Sequence[ReportRun]) -> list[str]:
    found = []
    for run in runs:
        marks = Counter(mark for result in run.record.cases for mark in result.marks)
        found += [f"{run.name}: {number} results {mark.replace(': ', ' (', 1)})" for mark, number in marks.items()]
        if run.usd_per_hour is not None and run.step is None:
            found.append(f"{run.name}: its price is not used, as no whole rl/step was measured")
        if run.record.calibration is None:
            found.append(f"{run.name}: limits were not measured, so that no share of them can be given")
        elif run.record.calibration.marks:
            found.append(f"{run.name}: limits may be too low: {'; '.join(run.record.calibration.marks)}")
    first = runs[0]
    for run in runs[1:]:
        if first.record.device_name != run.record.device_name:
            found.append(f"{first.name} and {run.name} are different devices: ratios compare whole stacks")
        differing = what_differs(first.record, run.record)
        shown = [f"{name} {a} / {b}" for name, (a, b) in differing.items() if name not in ("device", "processor")]
        if shown:
            found.append(f"{first.name} / {run.name} differ in: {'; '.join(shown)}")
    return found
