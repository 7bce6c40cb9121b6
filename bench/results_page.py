"""docs/results.md, made from the records in ``bench/results``: ``make results``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.bench.bars import HEADER, bars, verdicts
from rlcore.bench.compare import NOTES, device_of
from rlcore.bench.headlines import words
from rlcore.bench.limits import share_of_limit, times
from rlcore.bench.missing import missing
from rlcore.bench.result import CaseResult, Record, read
from rlcore.bench.rivals import is_of_machine
from rlcore.bench.statistics import percentile
from rlcore.bench.text import quantity, seconds, size

_HEAD = """\
# Results

Made by `make results` from the records in `bench/results`; nothing here is typed by hand. Medians, with the tenth and
the ninetieth percentile of n samples; every number was checked in the run that was timed. A share is that of the limit
measured on the same machine, where the case states what it needs of one. What the columns and marks mean:
[bench.md](bench.md). Reasons are shortened; the record has them whole. Sizes that all results of a table or a case have
stand above it or with its name; a cell is empty where it is as above, and a column in which nothing would stand is
left out.
"""
_OTHERS = 3
"""Metrics shown beside the time, first those that a bar is set for."""
_HEADER = ("case", "implementation", "sizes", "median", "p10 to p90", "n", "share", "also")
_LONG = 12
"""Rows from which on a table of the machine, size by size, is folded."""


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
    lines += [f"Notes: {note}.\n" for name in NOTES if (note := getattr(system, name))]
    marks = dict.fromkeys(mark for result in passed for mark in result.marks)
    lines += [f"Marks: {'; '.join(marks)}.\n"] if marks else []
    by_folder: dict[str, list[CaseResult]] = {}
    for result in passed:
        by_folder.setdefault(result.name.partition("/")[0], []).append(result)
    for folder, results in by_folder.items():
        lines += _folder(folder, results, record)
    if found := [verdict.cells() for verdict in verdicts(record)]:
        lines += ["\nWhat is meant to be reached:\n", *map(_row, [list(HEADER), ["---"] * len(HEADER), *found])]
    if others := missing(record.cases):
        header = ["status", "implementation", "why", "cases"]
        lines += ["\nWithout a number:\n", _row(header), _row(["---"] * len(header))]
        lines += [_row([one.status, one.implementation, one.why, ", ".join(one.cases)]) for one in others]
    return "\n".join(lines).rstrip() + "\n"


def _folder(folder: str, results: list[CaseResult], record: Record) -> list[str]:
    common = _common(results)
    by_case: dict[str, list[CaseResult]] = {}
    for result in results:
        by_case.setdefault(result.name, []).append(result)
    rows = [cells for case in by_case.values() for cells in _case(case, common, record)]
    kept = [column for column in range(len(_HEADER)) if any(row[column] for row in rows)]
    table = [_HEADER, ["---"] * len(_HEADER), *rows]
    told = f"All: {_sizes(common)}.\n" if common else ""
    lines = ["", *filter(None, [told]), *(_row([row[column] for column in kept]) for row in table)]
    if len(rows) < _LONG or not is_of_machine(results[0]):
        return [f"### {folder}", *lines, ""]
    return [f"### {folder}", "", f"<details><summary>{len(rows)} results</summary>", *lines, "", "</details>", ""]


def _case(results: list[CaseResult], common: Mapping[str, object], record: Record) -> list[list[str]]:
    """What is as in the row above is left out."""
    case = results[0].name
    own = {name: value for name, value in _common(results).items() if name not in common}
    title = case + (f" ({told})" if (told := _sizes(own, case)) else "")
    rows: list[list[str]] = []
    above = ""
    for result in results:
        sizes = {name: value for name, value in result.params.items() if name not in own and name not in common}
        name = result.implementation
        rows.append(["" if rows else title, "" if rows and name == above else name, _sizes(sizes, case)])
        rows[-1] += _numbers(result, record)
        above = name
    return rows


def _common(results: Sequence[CaseResult]) -> dict[str, object]:
    """Sizes that all of several results have."""
    first, *others = results
    if not others:
        return {}
    return {
        name: value
        for name, value in first.params.items()
        if all(name in one.params and one.params[name] == value for one in others)
    }


def _sizes(params: Mapping[str, object], case: str = "") -> str:
    """But those that the name of the case says."""
    return ", ".join(
        size(value) if name == "bytes" and isinstance(value, int) else f"{name} {value}"
        for name, value in params.items()
        if not (isinstance(value, str) and value in case)
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _numbers(result: CaseResult, record: Record) -> list[str]:
    samples, share = times(result), share_of_limit(result, record.calibration)
    low, high = (percentile(samples, percent) for percent in (10, 90))
    return [
        seconds(statistics.median(samples)),
        f"{seconds(low)} to {seconds(high)}" if len(samples) > 1 else "",
        str(len(samples)),
        f"{share.value:.2g} of {share.limit}" if share else "",
        "; ".join([*_other_metrics(result), *dict.fromkeys(mark.partition(":")[0] for mark in result.marks)]),
    ]


def _other_metrics(result: CaseResult) -> list[str]:
    left_out = ("time", "device_time", "processor_time", "first_run")
    meant = {bar.metric for bar in bars() if bar.case == result.name}
    shown = sorted(result.metrics, key=lambda metric: metric.name not in meant)
    shown = [metric for metric in shown if metric.name not in left_out][:_OTHERS]
    return [f"{words(metric.name)} {quantity(statistics.median(metric.samples), metric.unit)}" for metric in shown]
