"""What stands behind the headlines: a step by phase, shares of limits, rivals, curves by size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.bench import charts
from rlcore.bench.headlines import PHASES, Run, find, median, words
from rlcore.bench.limits import share_of_limit, times
from rlcore.bench.result import CaseResult
from rlcore.bench.statistics import percentile
from rlcore.bench.text import seconds
from rlcore.registry import registry

_MACHINE = ("attention", "collectives", "copies", "memory", "product")
"""Folders of cases that measure the machine: their contenders are ways to ask it, and no rivals."""
_FLOORS = ("bare products", "copy", "one_copy")
"""Contenders that do only what none can do without, and compute no result."""


def step(run: Run) -> dict[str, Any] | None:
    """A step of RL as a bar of its phases."""
    found = find(run.record, "rl/step")
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


def races(run: Run, *, is_alone: bool) -> list[_Group]:
    """Contenders that did the same work: ours against the others. ``is_alone``: the page has no other run."""
    works: dict[tuple[object, ...], list[CaseResult]] = {}
    for result in run.record.cases:
        if result.status == "pass" and result.name.partition("/")[0] not in _MACHINE:
            works.setdefault((result.name, tuple(sorted(result.params.items()))), []).append(result)
    ours = {implementation.name for entries in registry().ops.values() for implementation in entries}
    found = []
    for results in works.values():
        if len({result.implementation for result in results}) < 2:
            continue
        title = results[0].name if is_alone else f"{results[0].name} on {run.name}"
        found.append(_Group(title, _race(results, ours), _duel(results, ours)))
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
            points.setdefault(words(kind), []).append((float(result.params[x]), value(result)))
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
        lambda result: median(result, "bus_bandwidth"),
    ),
    ("collectives", "Collectives, latency", ("bytes", "bytes"), "s", lambda result: median(result, "time")),
)
