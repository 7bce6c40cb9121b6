"""The tables of results, targets and comparisons: the terminal, the README, the pages and the report show the same.

Markdown and CSV are written here, HTML by the report's template, a terminal's by the console.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from rlcore.bench.compare import ComparedResult, Comparison
from rlcore.bench.record import Calibration, CaseResult, Record, by_case
from rlcore.bench.reports.summary import (
    TARGET_COLUMNS,
    median,
    outcomes,
    p10_p90,
    share_of_limit,
    shortened,
    targets,
    times,
)
from rlcore.bench.reports.text import quantity, seconds, size, words


class ResultTable(NamedTuple):
    """A table of texts."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def only(self, *columns: str) -> Self:
        """Return the table with these columns alone, in this order."""
        places = [list(self.header).index(column) for column in columns]
        return type(self)(columns, [[row[place] for place in places] for row in self.rows])

    def compact(self) -> Self:
        """Return the table without the columns in which no row has anything."""
        kept = [column for column in range(len(self.header)) if any(row[column] for row in self.rows)]
        header, *rows = ([row[column] for column in kept] for row in (self.header, *self.rows))
        return type(self)(header, rows)

    def markdown(self) -> str:
        lines = (self.header, ["---"] * len(self.header), *self.rows)
        return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)

    def csv(self) -> str:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.header, *self.rows])
        return file.getvalue()


# --------------------------------------------------------------------------------------------------- results

_RESULT_COLUMNS = ("case", "implementation", "sizes", "status", "median", "p10 to p90", "n", "share", "also", "marks")
_OTHERS = 3
"""Metrics shown beside the time, first those that a target is set for."""


def results_table(results: Iterable[CaseResult], calibration: Calibration | None) -> ResultTable:
    """Return a row for each result; its sizes are those in which the results of its case differ."""
    rows = []
    for case, group in by_case(results).items():
        shared = shared_sizes([result.params for result in group])
        for result in group:
            sizes = sizes_told(result.params, case, leave_out=shared)
            rows.append([case, result.implementation, sizes, result.status, *_numbers(result, calibration)])
    return ResultTable(_RESULT_COLUMNS, rows)


def shared_sizes(params: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the sizes that all of several results have."""
    first, *others = params
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}


def sizes_told(params: Mapping[str, object], case: str = "", leave_out: Iterable[str] = ()) -> str:
    """Return sizes in words, but for those that the name of the case says."""
    return ", ".join(
        size(value) if name == "bytes" and isinstance(value, int) else f"{name} {value}"
        for name, value in params.items()
        if name not in leave_out and not (isinstance(value, str) and value in case)
    )


def _numbers(result: CaseResult, calibration: Calibration | None) -> list[str]:
    if result.status != "pass":
        return [shortened(result.reason, result.implementation), "", "", "", "", ""]
    samples, share = times(result), share_of_limit(result, calibration)
    low, high = map(seconds, p10_p90(samples))
    return [
        seconds(statistics.median(samples)),
        f"{low} to {high}" if len(samples) > 1 else "",
        str(len(samples)),
        f"{share.value:.3g} of {share.limit}" if share else "",
        "; ".join([*_other_metrics(result), *result.kinds_of_marks()]),
        "; ".join(result.marks),
    ]


def _other_metrics(result: CaseResult) -> list[str]:
    left_out = ("time", "device_time", "processor_time", "first_run")
    meant = {target.metric for target in targets() if target.case == result.name}
    shown = sorted(result.metrics, key=lambda metric: metric.name not in meant)
    shown = [metric for metric in shown if metric.name not in left_out][:_OTHERS]
    return [f"{words(one.name)} {quantity(median(result, one.name), one.unit)}" for one in shown]


def targets_table(record: Record) -> ResultTable:
    """Return what is meant to be reached on the record's device, beside what was."""
    return ResultTable(TARGET_COLUMNS, [outcome.cells() for outcome in outcomes(record)])


def missing_table(record: Record) -> ResultTable:
    """Return the results without a number, in one row those of the same reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in record.cases:
        if result.status != "pass":
            why = shortened(result.reason, result.implementation)
            found.setdefault((result.status, result.implementation, why), []).append(result.name)
    rows = [[*same, ", ".join(cases)] for same, cases in found.items()]
    return ResultTable(["status", "implementation", "why", "cases"], rows)


# ----------------------------------------------------------------------------------------------- comparisons

_CLOCKS = {"time": "wall", "device_time": "device", "processor_time": "processors"}


def compared_table(found: Comparison) -> ResultTable:
    """Return a row for each result of the cases that both runs have."""
    both = {row.case for row in found.rows if not row.is_of_one}
    groups: dict[str, list[ComparedResult]] = {case: [] for case in dict.fromkeys(row.case for row in found.rows)}
    for row in found.rows:
        groups[row.case].append(row)
    rows = []
    for case, group in groups.items():
        shared = shared_sizes([row.params for row in group])
        rows += [
            [case, row.implementation, sizes_told(row.params, case, leave_out=shared), *_ratio(row)]
            for row in group
            if case in both
        ]
    header = ["case", "implementation", "sizes", "clock", found.name_a, found.name_b]
    header += ["ratio", "99 % interval", "noise", "p", "verdict"]
    prices = any(row.cost_ratio for row in found.rows)
    table = ResultTable([*header, "cost ratio", "USD/M tokens"], rows)
    return table if prices else ResultTable(header, [row[: len(header)] for row in rows])


def _ratio(row: ComparedResult) -> list[str]:
    verdict = f"{row.verdict}: {shortened(row.reason, row.implementation)}" if row.reason else row.verdict
    found, usd = row.difference, row.usd_per_million_tokens
    if found is None or row.median_a is None or row.median_b is None:
        return [*[""] * 7, verdict, "", ""]
    return [
        _CLOCKS[found.clock],
        seconds(row.median_a),
        seconds(row.median_b),
        f"{found.ratio:.3f}",
        f"{found.low:.3f} to {found.high:.3f}",
        noise_told(found.noise),
        f"{found.p:.1g}",
        verdict,
        "" if row.cost_ratio is None else f"{row.cost_ratio:.2f}",
        f"{usd[0]:.3g} / {usd[1]:.3g}" if usd else "",
    ]


def noise_told(share: float) -> str:
    if not math.isfinite(share):
        return "unknown"
    return f"{share:.1%}" if share <= 1 else "over 100%"
