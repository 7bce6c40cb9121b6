"""What stands behind the headlines: a step by phase, shares of limits, rivals, curves by size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.bench import charts
from rlcore.bench.headlines import PHASES, Run, find_step, median, words
from rlcore.bench.limits import share_of_limit, times
from rlcore.bench.result import CaseResult
from rlcore.bench.rivals import Race, is_floor, is_ours, races
from rlcore.bench.statistics import percentile
from rlcore.bench.text import seconds


def step(run: Run) -> dict[str, Any] | None:
    """A step of RL as a bar of its phases."""
    found = find_step(run.record)
    if found is None:
        return None
    parts = [median(found, name) for name in PHASES]
    parts.append(max(0.0, median(found, "time") - sum(parts)))
    named = zip([*map(words, PHASES), "the rest"], parts, strict=True)
    params = found.params
    return {
        "run": run.name,
        "total": seconds(median(found, "time")),
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


def shares(run: Run) -> _Group | None:
    """The best result of each case and limit: of ours where there is one, and never of those that compute nothing."""
    with_ours = {result.name for result in run.record.cases if result.status == "pass" and is_ours(result)}
    best: dict[tuple[str, str], tuple[float, CaseResult]] = {}
    for result in run.record.cases:
        share = share_of_limit(result, run.record.calibration)
        if share is None or is_floor(result) or (result.name in with_ours and not is_ours(result)):
            continue
        if share.value > best.get((result.name, share.limit), (0.0, result))[0]:
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


def duels(run: Run, *, is_alone: bool) -> list[_Group]:
    """Ours against the others. ``is_alone``: the page has no other run."""
    found = races(run.record)
    where = "" if is_alone else f" on {run.name}"
    return [_Group(f"{race.case}{where}{_own_sizes(race, found)}", _race(race.results), _duel(race)) for race in found]


def _own_sizes(race: Race, every: Sequence[Race]) -> str:
    """What tells a race from the others of its case."""
    params = race.results[0].params
    others = [one.results[0].params for one in every if one.case == race.case]
    own = [f"{name} {value}" for name, value in params.items() if any(one.get(name) != value for one in others)]
    return f" ({', '.join(own)})" if own else ""


def _duel(race: Race) -> str:
    """The best of ours beside the best of the others."""
    ours, theirs, floor = race.ours, race.theirs, race.floor
    shown = [f"{side.implementation} {seconds(side.seconds)}" for side in (ours, theirs) if side]
    if ours and theirs:
        shown[-1] += f": {theirs.seconds / ours.seconds:.2f}x"
    return " against ".join(shown) + (f" (floor: {floor.implementation} {seconds(floor.seconds)})" if floor else "")


def _race(results: list[CaseResult]) -> list[_Bar]:
    medians = {result.implementation: statistics.median(times(result)) for result in results}
    slowest, fastest = max(medians.values()), min(medians.values())
    bars = []
    for result in sorted(results, key=lambda result: medians[result.implementation]):
        median = medians[result.implementation]
        low, high = (percentile(times(result), percent) for percent in (10, 90))
        bars.append(
            _Bar(
                label=result.implementation,
                detail=f"p10 {seconds(low)}, p90 {seconds(high)}",
                svg=charts.bar(median / slowest, 0 if is_ours(result) else 1),
                value=f"{seconds(median)}, {median / fastest:.2f}x",
                is_ours=is_ours(result),
                marks=_marks(result),
            )
        )
    return bars


def curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Lines by size, of every run that has two points or more."""
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


def _lines(run: Run, case: str, x: str, value: _Value, *, several: bool) -> list[charts.Line]:
    """One for each case under ``case``, or each dtype of it. Cases of others there need not have what a curve shows."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result in run.record.cases:
        if result.status != "pass" or not f"{result.name}/".startswith(f"{case}/"):
            continue
        kind = str(result.params.get("dtype", "")) if result.name == case else result.name.removeprefix(f"{case}/")
        size, y = result.params.get(x), value(result)
        if isinstance(size, (int, float)) and size > 0 and y is not None:
            points.setdefault(words(kind), []).append((float(size), y))
    return [charts.Line(f"{kind}, {run.name}" if several else kind, points[kind]) for kind in points]


def _product_rate(result: CaseResult) -> float | None:
    flops = next((amount for limit, amount in result.limits.items() if limit.startswith("product/")), None)
    return None if flops is None else flops / statistics.median(times(result))


def _bus_bandwidth(result: CaseResult) -> float | None:
    return median(result, "bus_bandwidth") if result.has("bus_bandwidth") else None


_Value = Callable[[CaseResult], float | None]


_CURVES: tuple[tuple[str, str, tuple[str, str], str, _Value], ...] = (
    ("product/sweep", "Matrix products", ("K", "inner dimension"), "FLOP/s", _product_rate),
    ("attention", "Attention", ("L", "sequence length"), "FLOP/s", _product_rate),
    (
        "collectives",
        "Collectives, bus bandwidth",
        ("bytes", "bytes"),
        "B/s",
        _bus_bandwidth,
    ),
    ("collectives", "Collectives, latency", ("bytes", "bytes"), "s", lambda result: median(result, "time")),
)
