"""One HTML page about one run or several: self-contained, readable in 30 seconds.

How fast is this machine for reinforcement learning, what limits it, how do machines compare; then the evidence.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.bench import charts
from rlcore.bench.compare import compare, device_of, what_differs
from rlcore.bench.limits import peak, share_of_limit, times, unit
from rlcore.bench.result import CaseResult, Record
from rlcore.bench.statistics import percentile
from rlcore.bench.text import count, rate, seconds
from rlcore.errors import MissingDependencyError
from rlcore.registry import registry

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_MACHINE = ("attention", "collectives", "copies", "memory", "product")
"""Folders of cases that measure the machine: their contenders are ways to ask it, and no rivals."""
_FLOORS = ("bare products", "copy", "one_copy")
"""Contenders that do only what none can do without, and compute no result."""
_PHASES = ("generate", "old_logprob", "update", "sync", "switch", "reward")
"""Of rl/step; "the rest" follows them."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    record: Record
    usd_per_hour: float | None = None
    """For one device."""


def render(runs: Sequence[Run]) -> str:
    """The page; raises MissingDependencyError without jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("jinja2", needed_for="the report", extra="bench") from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(
        runs=[_about(run) for run in runs],
        headlines=_headlines(runs),
        steps=list(filter(None, map(_step, runs))),
        phase_names=[(charts.square(i), name) for i, name in enumerate([*map(_words, _PHASES), "the rest"])],
        shares=list(filter(None, map(_shares, runs))),
        races=[race for run in runs for race in _races(run)],
        curves=_curves(runs),
        versus=[_versus(runs[0], run) for run in runs[1:]],
        limits=_limits(runs),
        missing=[(run.name, _missing(run.record)) for run in runs if _missing(run.record)],
        caveats=_caveats(runs),
    )


# ------------------------------------------------------------------------------------------------- the top


def _about(run: Run) -> dict[str, Any]:
    record, system = run.record, run.record.system
    passed = [result for result in record.cases if result.status == "pass"]
    return {
        "name": run.name,
        "device": device_of(record),
        "facts": {
            "devices": str(system.accelerators_per_node) if system.accelerators_per_node else "the host itself",
            "host": f"{system.host_processor_model_name}, {system.host_processor_core_count} cores, "
            f"{system.host_memory_capacity_bytes / 2**30:.0f} GiB",
            "software": ", ".join(
                [
                    system.framework or f"torch {record.dependencies.get('torch', 'unknown')}",
                    *(f"{name} {version}" for name, version in system.other_software_stack.items()),
                    f"Python {system.python}",
                ]
            ),
            "rlcore": f"{record.rlcore}, commit {record.commits()}",
            "measured": f"{record.started_at[:16].replace('T', ' ')} UTC, {record.effort} run, "
            f"{len(passed)} of {len(record.cases)} results",
        },
    }


def _find(record: Record, case: str) -> CaseResult | None:
    return next((result for result in record.cases if result.name == case and result.status == "pass"), None)


def _median(result: CaseResult, metric: str) -> float:
    return statistics.median(result.samples(metric))


@dataclass(frozen=True, slots=True)
class _Headline:
    label: str
    cells: list[str]


def _headlines(runs: Sequence[Run]) -> list[_Headline]:
    """How fast for reinforcement learning: one row a question, one cell a run."""
    questions: dict[str, Callable[[Run], str | None]] = {
        "one step of RL": lambda run: _cell(run, "rl/step", "time", seconds),
        "tokens trained a second, whole step": lambda run: _cell(run, "rl/step", "trained_tokens", count),
        "bubble: share of the step not sampling, scoring or training": lambda run: _cell(
            run, "rl/step", "bubble", "{:.0%}".format
        ),
        "USD for a million tokens trained": _cost,
        "tokens sampled a second": lambda run: (
            _cell(run, "rollout/hf", "new_tokens", count) or _cell(run, "rl/step", "new_tokens", count)
        ),
        "one train step": lambda run: _cell(run, "train/step", "time", seconds),
        "what limits it": _limiter,
    }
    found = []
    for label, question in questions.items():
        cells = [question(run) for run in runs]
        if any(cells):
            found.append(_Headline(label, [cell or "not measured" for cell in cells]))
    return found


def _cell(run: Run, case: str, metric: str, form: Callable[[float], str]) -> str | None:
    result = _find(run.record, case)
    return form(_median(result, metric)) if result and result.has(metric) else None


def _cost(run: Run) -> str | None:
    result = _find(run.record, "rl/step")
    if result is None or run.usd_per_hour is None:
        return None
    devices = int(result.params.get("devices", 1))
    per_token = run.usd_per_hour * devices / 3600 / _median(result, "trained_tokens")
    return f"{per_token * 1e6:.3g} at {run.usd_per_hour:g} an hour and device"


def _limiter(run: Run) -> str | None:
    """The longest phase of the step."""
    step = _find(run.record, "rl/step")
    if step is None:
        return None
    phases = {name: _median(step, name) for name in _PHASES}
    longest = max(phases, key=phases.__getitem__)
    return f"{_words(longest)}: {phases[longest] / _median(step, 'time'):.0%} of a step"


def _words(name: str) -> str:
    return name.replace("_", " ")


# ------------------------------------------------------------------------------------------------ evidence


def _step(run: Run) -> dict[str, Any] | None:
    step = _find(run.record, "rl/step")
    if step is None:
        return None
    parts = [_median(step, name) for name in _PHASES]
    parts.append(max(0.0, _median(step, "time") - sum(parts)))
    named = zip([*map(_words, _PHASES), "the rest"], parts, strict=True)
    params = step.params
    return {
        "run": run.name,
        "total": seconds(_median(step, "time")),
        "svg": charts.stack(parts),
        "text": ", ".join(f"{name} {seconds(part)}" for name, part in named if part > 0),
        "model": f"{params.get('model')}, {params.get('prompts')} prompts, {params.get('samples')} samples",
    }


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    detail: str
    svg: str
    value: str
    is_ours: bool = False
    marks: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    title: str
    bars: list[_Bar] = field(default_factory=list)
    summary: str = ""


def _shares(run: Run) -> _Group | None:
    """The best result of each case and limit."""
    best: dict[tuple[str, str], tuple[float, CaseResult]] = {}
    for result in run.record.cases:
        share = share_of_limit(result, run.record.calibration)
        if share is not None and share.value > best.get((result.name, share.limit), (0.0, result))[0]:
            best[result.name, share.limit] = share.value, result
    bars = [
        _Bar(
            label=name,
            detail=f"{result.implementation}, of {limit}",
            svg=charts.bar(value, 0),
            value=_percent(value),
            marks=_marks(result),
        )
        for (name, limit), (value, result) in sorted(best.items())
    ]
    return _Group(run.name, bars) if bars else None


def _marks(result: CaseResult) -> str:
    """The caveats say the rest."""
    return ", ".join(dict.fromkeys(mark.partition(":")[0] for mark in result.marks))


def _percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _races(run: Run) -> list[_Group]:
    """Contenders that did the same work: ours against the others."""
    works: dict[tuple[object, ...], list[CaseResult]] = {}
    for result in run.record.cases:
        if result.status == "pass" and result.name.partition("/")[0] not in _MACHINE:
            works.setdefault((result.name, tuple(sorted(result.params.items()))), []).append(result)
    ours = {implementation.name for entries in registry().ops.values() for implementation in entries}
    found = []
    for (name, _), results in works.items():
        if len({result.implementation for result in results}) < 2:
            continue
        found.append(_Group(f"{name} on {run.name}", _race(results, ours), _duel(results, ours)))
    return sorted(found, key=lambda group: group.title)


def _duel(results: list[CaseResult], ours: set[str]) -> str:
    """The best of ours beside the best of the others."""
    kinds = {"ours": _best(results, lambda r: _is_ours(r, ours)), "theirs": _best(results, lambda r: _is_peer(r, ours))}
    shown = [f"{found[1]} {seconds(found[0])}" for found in kinds.values() if found]
    if kinds["ours"] and kinds["theirs"]:
        shown[-1] += f": {kinds['theirs'][0] / kinds['ours'][0]:.2f}x"
    floor = _best(results, lambda result: result.implementation in _FLOORS)
    return " against ".join(shown) + (f" (floor: {floor[1]} {seconds(floor[0])})" if floor else "")


def _best(results: list[CaseResult], belongs: Callable[[CaseResult], bool]) -> tuple[float, str] | None:
    return min(((statistics.median(times(r)), r.implementation) for r in results if belongs(r)), default=None)


def _is_peer(result: CaseResult, ours: set[str]) -> bool:
    return not _is_ours(result, ours) and result.implementation not in _FLOORS


def _is_ours(result: CaseResult, ours: set[str]) -> bool:
    return result.implementation.partition(",")[0] in ours


def _race(results: list[CaseResult], ours: set[str]) -> list[_Bar]:
    medians = {result.implementation: statistics.median(times(result)) for result in results}
    slowest, fastest = max(medians.values()), min(medians.values())
    bars = []
    for result in sorted(results, key=lambda result: medians[result.implementation]):
        median = medians[result.implementation]
        low, high = (percentile(times(result), percent) for percent in (10, 90))
        is_ours = _is_ours(result, ours)
        bars.append(
            _Bar(
                label=result.implementation,
                detail=f"p10 {seconds(low)}, p90 {seconds(high)}",
                svg=charts.bar(median / slowest, 0 if is_ours else 1),
                value=f"{seconds(median)}, {median / fastest:.2f}x",
                is_ours=is_ours,
                marks=_marks(result),
            )
        )
    return bars


def _curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    found = []
    for case, name, (x, x_title), y_title, value in _CURVES:
        lines = [line for run in runs for line in _lines(run, case, x, value, several=len(runs) > 1)]
        lines = [line for line in lines if len(line.points) > 1]
        if lines:
            found.append(
                {
                    "title": name,
                    "y": y_title,
                    "svg": charts.curves(lines, x_title=x_title, y_title=y_title),
                    "legend": [(charts.legend_mark(i), line.name) for i, line in enumerate(lines)],
                }
            )
    return found


def _lines(run: Run, case: str, x: str, value: Callable[[CaseResult], float], *, several: bool) -> list[charts.Line]:
    """One for each case under ``case``, or each dtype of it."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result in run.record.cases:
        if (
            result.status == "pass"
            and (result.name == case or result.name.startswith(f"{case}/"))
            and x in result.params
        ):
            kind = str(result.params["dtype"]) if result.name == case else result.name.removeprefix(f"{case}/")
            points.setdefault(_words(kind), []).append((float(result.params[x]), value(result)))
    return [charts.Line(f"{kind}, {run.name}" if several else kind, points[kind]) for kind in points]


def _product_rate(result: CaseResult) -> float:
    return next(iter(result.limits.values())) / statistics.median(times(result))


_CURVES: tuple[tuple[str, str, tuple[str, str], str, Callable[[CaseResult], float]], ...] = (
    ("product/sweep", "Matrix products", ("K", "inner dimension"), "FLOP/s", _product_rate),
    ("attention", "Attention", ("L", "sequence length"), "FLOP/s", _product_rate),
    (
        "collectives",
        "Collectives, bus bandwidth",
        ("bytes", "bytes"),
        "B/s",
        lambda result: _median(result, "bus_bandwidth"),
    ),
    ("collectives", "Collectives, latency", ("bytes", "bytes"), "s", lambda result: _median(result, "time")),
)


def _versus(first: Run, other: Run) -> dict[str, Any]:
    """Ratios of every result that both have."""
    found = compare(first.record, other.record, names=(first.name, other.name))
    rows = [
        {
            "case": row.case,
            "implementation": row.implementation,
            "params": ", ".join(f"{name} {value}" for name, value in row.params.items()),
            "ratio": f"{row.difference.ratio:.3g}",
            "interval": f"{row.difference.low:.3g} to {row.difference.high:.3g}",
            "verdict": row.verdict,
        }
        for row in found.rows
        if row.difference is not None
    ]
    return {"first": first.name, "other": other.name, "statement": found.statement, "rows": rows}


# -------------------------------------------------------------------------------------- limits and caveats


def _limits(runs: Sequence[Run]) -> list[list[str]]:
    """Limit, then for each run what was measured, and what the datasheet says."""
    names = dict.fromkeys(name for run in runs if run.record.calibration for name in run.record.calibration.limits)
    return [[name, *(_limit(run, name) for run in runs)] for name in names]


def _limit(run: Run, name: str) -> str:
    calibration = run.record.calibration
    if calibration is None or name not in calibration.limits:
        return "n/a"
    value, sheet = calibration.limits[name], peak(run.record.system, name)
    told = f"; datasheet {rate(sheet.value, unit(name))} ({value / sheet.value:.0%})" if sheet else "; datasheet n/a"
    return rate(value, unit(name)) + told


def _missing(record: Record) -> list[tuple[str, str, str]]:
    """Case and contender, status, reason; one line for a case of which nothing ran for the same reason."""
    found: Mapping[tuple[str, str, str], None] = dict.fromkeys(
        (result.name, result.status, result.reason.partition("\n")[0]) if not result.implementation
        else (f"{result.name}: {result.implementation}", result.status, result.reason.partition("\n")[0])
        for result in record.cases
        if result.status != "pass"
    )  # fmt: skip
    return list(found)


def _caveats(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        marks: dict[str, int] = {}
        for result in run.record.cases:
            for mark in result.marks:
                marks[mark] = marks.get(mark, 0) + 1
        found += [f"{run.name}: {number} results {mark.replace(': ', ' (', 1)})" for mark, number in marks.items()]
        if run.record.calibration is None:
            found.append(f"{run.name}: limits were not measured, so that no share of them can be given")
    for run in runs[1:]:
        first = runs[0]
        if device_of(first.record) != device_of(run.record):
            found.append(f"{first.name} and {run.name} are different devices: ratios compare whole stacks")
        differing = what_differs(first.record, run.record)
        shown = [f"{name} {a} / {b}" for name, (a, b) in differing.items() if name not in ("device", "processor")]
        if shown:
            found.append(f"{first.name} / {run.name} differ in: {'; '.join(shown)}")
    return found
