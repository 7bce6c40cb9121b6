"""One HTML page about one run or several: self-contained, readable in 30 seconds.

How fast is this machine for reinforcement learning, what limits it, how do machines compare (``headlines.py``); then
what stands behind that (``evidence.py``), and what it is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.bench import charts, evidence
from rlcore.bench.bars import verdicts
from rlcore.bench.compare import NOTES, compare, device_of, what_differs
from rlcore.bench.headlines import NOT_MEASURED, PHASES, Run, find_step, headlines, words
from rlcore.bench.limits import peak, unit
from rlcore.bench.missing import missing
from rlcore.bench.result import Record
from rlcore.bench.text import rate
from rlcore.errors import MissingDependencyError

_TEMPLATE = Path(__file__).with_name("report.html.j2")


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
        headlines=headlines(runs),
        absent=NOT_MEASURED,
        has_step=any(find_step(run.record) for run in runs),
        steps=list(filter(None, map(evidence.step, runs))),
        phase_names=[(charts.square(i), name) for i, name in enumerate([*map(words, PHASES), "the rest"])],
        shares=list(filter(None, map(evidence.shares, runs))),
        races=[race for run in runs for race in evidence.duels(run, is_alone=len(runs) == 1)],
        curves=evidence.curves(runs),
        versus=[_versus(runs[0], run) for run in runs[1:]],
        limits=_limits(runs),
        meant=[(run.name, [one.cells() for one in verdicts(run.record)]) for run in runs if verdicts(run.record)],
        missing=[(run.name, found) for run in runs if (found := missing(run.record.cases))],
        caveats=_caveats(runs),
    )


def _about(run: Run) -> dict[str, Any]:
    record, system = run.record, run.record.system
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
            **{name.replace("_", " "): note for name in NOTES if (note := getattr(system, name))},
            "measured": f"{record.started_at[:16].replace('T', ' ')} UTC, {record.effort} run, {_counts(record)}",
        },
    }


def _counts(record: Record) -> str:
    """ "20 results, 7 blocked, 70 skipped"."""
    statuses = Counter(result.status for result in record.cases)
    others = [f"{statuses[status]} {status}" for status in ("fail", "oom", "blocked", "skipped") if statuses[status]]
    return ", ".join([f"{statuses['pass']} results", *others])


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


def _caveats(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        marks: dict[str, int] = {}
        for result in run.record.cases:
            for mark in result.marks:
                marks[mark] = marks.get(mark, 0) + 1
        found += [f"{run.name}: {number} results {mark.replace(': ', ' (', 1)})" for mark, number in marks.items()]
        if run.usd_per_hour is not None and find_step(run.record) is None:
            found.append(f"{run.name}: its price is not used, as no whole rl/step was measured")
        if run.record.calibration is None:
            found.append(f"{run.name}: limits were not measured, so that no share of them can be given")
        elif run.record.calibration.marks:
            found.append(f"{run.name}: limits may be too low: {'; '.join(run.record.calibration.marks)}")
    for run in runs[1:]:
        first = runs[0]
        if device_of(first.record) != device_of(run.record):
            found.append(f"{first.name} and {run.name} are different devices: ratios compare whole stacks")
        differing = what_differs(first.record, run.record)
        shown = [f"{name} {a} / {b}" for name, (a, b) in differing.items() if name not in ("device", "processor")]
        if shown:
            found.append(f"{first.name} / {run.name} differ in: {'; '.join(shown)}")
    return found
