"""docs/results.md, made from the records in ``bench/results``: ``make results``."""

from __future__ import annotations

import statistics
from pathlib import Path

from rlcore.bench.bars import HEADER, verdicts
from rlcore.bench.compare import device_of
from rlcore.bench.limits import share_of_limit, times
from rlcore.bench.missing import missing
from rlcore.bench.result import CaseResult, Record, read
from rlcore.bench.statistics import percentile
from rlcore.bench.text import quantity, seconds

_HEAD = """\
# Results

Made by `make results` from the records in `bench/results`; nothing here is typed by hand. Medians, with the tenth and
the ninetieth percentile of n samples; every number was checked in the run that was timed. A share is that of the limit
measured on the same machine, where the record has limits. What the columns and marks mean: [bench.md](bench.md).
Reasons are shortened; the record has them whole.
"""
_OTHERS = 3
"""Metrics shown beside the time."""


def page(results: Path) -> str:
    return _HEAD + "".join(_section(path.stem, read(path)) for path in sorted(results.glob("*.json")))


def _section(name: str, record: Record) -> str:
    passed = [result for result in record.cases if result.status == "pass"]
    system = record.system
    software = [system.framework or f"torch {record.dependencies['torch']}", f"Python {system.python}"]
    software += [f"{what} {version}" for what, version in system.other_software_stack.items()]
    lines = [
        f"\n## {name}: {device_of(record)}\n",
        f"{record.started_at[:10]}, {', '.join(software)}; rlcore {record.rlcore}, commit {record.commits()}; "
        f"host: {system.host_processor_model_name}, "
        f"{system.host_processor_core_count} cores.\n",
    ]
    if passed:
        header = ["case", "implementation", "sizes", "median", "p10 to p90", "n", "share", "also"]
        lines += [_row(header), _row(["---"] * len(header)), *(_row(_cells(result, record)) for result in passed)]
    if found := [verdict.cells() for verdict in verdicts(record)]:
        lines += ["\nWhat is meant to be reached:\n", *map(_row, [list(HEADER), ["---"] * len(HEADER), *found])]
    if others := missing(record.cases):
        header = ["status", "implementation", "why", "cases"]
        lines += ["\nWithout a number:\n", _row(header), _row(["---"] * len(header))]
        lines += [_row([one.status, one.implementation, one.why, ", ".join(one.cases)]) for one in others]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _cells(result: CaseResult, record: Record) -> list[str]:
    samples, share = times(result), share_of_limit(result, record.calibration)
    low, high = (percentile(samples, percent) for percent in (10, 90))
    return [
        result.name,
        result.implementation,
        ", ".join(f"{name} {value}" for name, value in result.params.items()),
        seconds(statistics.median(samples)),
        f"{seconds(low)} to {seconds(high)}",
        str(len(samples)),
        f"{share.value:.2g} of {share.limit}" if share else "n/a",
        "; ".join([*_other_metrics(result), *result.marks]),
    ]


def _other_metrics(result: CaseResult) -> list[str]:
    left_out = ("time", "device_time", "processor_time", "first_run")
    shown = [metric for metric in result.metrics if metric.name not in left_out][:_OTHERS]
    return [f"{metric.name} {quantity(statistics.median(metric.samples), metric.unit)}" for metric in shown]
