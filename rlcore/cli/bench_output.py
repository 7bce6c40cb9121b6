"""The output of the commands ``rlcore bench ...``: progress, results, comparisons."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlcore.cli.console import console_of, print_table, print_text

if TYPE_CHECKING:
    from rlcore.bench.case import Case
    from rlcore.bench.compare import ComparedResult, Comparison
    from rlcore.bench.estimate import Durations
    from rlcore.bench.record import Calibration, CaseResult, Record

_CLOCKS = {"time": "wall", "device_time": "device", "processor_time": "processors"}


class _Shown(NamedTuple):
    report: Callable[[Case, list[CaseResult]], None]
    step: Callable[[str], None]


@contextlib.contextmanager
def progress(durations: Durations, cases: list[Case], rounds: int) -> Iterator[_Shown]:
    """Show a progress bar on a terminal; elsewhere a line for each step of a case and its first result."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    seen: set[str] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = console_of(sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=sum(map(durations.of, cases)))

        def report(case: Case, results: list[CaseResult]) -> None:
            left = rounds if any(result.is_repeated for result in results) else 1  # there is no other round of it
            bar.update(task, advance=durations.of(case) / left, description=case.name)
            if case.name not in seen:
                seen.add(case.name)
                for row in _rows(results, None):
                    bar.console.print("  ".join(filter(None, row[:5])), markup=False, highlight=False, soft_wrap=True)

        def step(at: str) -> None:
            if not console.is_terminal:
                console.print(at, markup=False, highlight=False, soft_wrap=True)

        yield _Shown(report, step)


def print_results(record: Record) -> None:
    """Print a line for each result, the number of skipped cases by reason, and the targets of this device."""
    from rlcore.bench.summary import TARGET_COLUMNS, outcomes

    by_case: dict[str, list[CaseResult]] = {}
    for result in record.cases:
        if result.status != "skipped":
            by_case.setdefault(result.name, []).append(result)
    header = ["case", "implementation", "sizes", "status", "median", "n", "share", "marks"]
    print_table(header, [row for results in by_case.values() for row in _rows(results, record.calibration)])
    if record.calibration and record.calibration.marks:
        print_text(f"limits may be too low: {'; '.join(record.calibration.marks)}")
    skipped = Counter(result.reason for result in record.cases if result.status == "skipped")
    for reason, number in skipped.items():
        print_text(f"{number} cases skipped: {reason}")
    if targets := [outcome.cells() for outcome in outcomes(record)]:
        print_table(list(TARGET_COLUMNS), targets)


def _rows(results: Sequence[CaseResult], calibration: Calibration | None) -> list[list[str]]:
    """Return the table rows of the results of one case."""
    sizes = _sizes([result.params for result in results])
    return [_row(result, size, calibration) for result, size in zip(results, sizes, strict=True)]


def _sizes(results: Sequence[Mapping[str, object]]) -> list[str]:
    """Return for each result of a case the parameters in which the results differ."""
    differing = [name for name in results[0] if len({params.get(name) for params in results}) > 1]
    return [", ".join(f"{name} {params[name]}" for name in differing if name in params) for params in results]


def _row(result: CaseResult, sizes: str, calibration: Calibration | None) -> list[str]:
    from rlcore.bench.summary import share_of_limit, shortened
    from rlcore.bench.text import seconds

    first = [result.name, result.implementation, sizes, result.status]
    if result.status != "pass":
        return [*first, shortened(result.reason, result.implementation), "", "", ""]
    samples = result.samples("time")
    share = share_of_limit(result, calibration)
    return [
        *first,
        seconds(statistics.median(samples)),
        str(len(samples)),
        f"{share.value:.3g} of {share.limit}" if share else "n/a",
        "; ".join(result.marks),
    ]


def print_comparison(found: Comparison) -> None:
    """Print the differences of two runs, a line for each result, and the number of results by verdict."""
    rows = [[name, *pair] for name, pair in found.differences.items()]
    print_table(["differs", found.name_a, found.name_b], rows or [["nothing recorded", "", ""]])
    print_text(found.statement + "\n")
    both = {row.case for row in found.rows if not row.is_of_one}
    by_case: dict[str, list[ComparedResult]] = {}
    for row in found.rows:
        if row.case in both:
            by_case.setdefault(row.case, []).append(row)
    header = ["case", "implementation", "sizes", "clock", found.name_a, found.name_b]
    header += ["ratio", "99 % interval", "noise", "p", "verdict"]
    prices = any(row.cost_ratio for row in found.rows)
    rows = [
        _compared(row, size, prices)
        for group in by_case.values()
        for row, size in zip(group, _sizes([row.params for row in group]), strict=True)
    ]
    print_table(header + ["cost ratio", "USD/M tokens"] * prices, rows)
    counts = Counter(row.verdict for row in found.rows)
    told = [f"{counts[verdict]} {verdict}" for verdict in ("about equal", "faster", "slower", *sorted(counts))]
    mean = "" if found.geometric_mean is None else f"; geometric mean of the ratios {found.geometric_mean:.3f}"
    print_text(", ".join(dict.fromkeys(told)) + mean)
    if left_out := [row.case for row in found.rows if row.case not in both]:
        folders = ", ".join(dict.fromkeys(case.partition("/")[0] for case in left_out))
        print_text(f"Not shown: {len(left_out)} results of cases, or of sizes, that one run alone has ({folders}).")
    turns = [row.difference.turns for row in found.compared if row.difference and row.difference.turns]
    if turns:
        print_text(
            f"Both took turns at {len(turns)} results ({min(turns)} or more): the ratio is the mean of each turn's."
        )
    if noises := [row.difference.noise for row in found.compared if row.difference]:
        print_text(f"What is less than the noise was not seen: {min(noises):.1%} at best, {max(noises):.1%} at worst.")


def _noise(share: float) -> str:
    if not math.isfinite(share):
        return "unknown"
    return f"{share:.1%}" if share <= 1 else "over 100%"


def _compared(row: ComparedResult, sizes: str, has_prices: bool) -> list[str]:
    from rlcore.bench.summary import shortened
    from rlcore.bench.text import seconds

    first = [row.case, row.implementation, sizes]
    if row.difference is None or row.median_a is None or row.median_b is None:
        return [
            *first,
            *[""] * 7,
            f"{row.verdict}: {shortened(row.reason, row.implementation)}",
            *[""] * 2 * has_prices,
        ]
    found = row.difference
    usd = row.usd_per_million_tokens
    costs = ["" if row.cost_ratio is None else f"{row.cost_ratio:.2f}", f"{usd[0]:.3g} / {usd[1]:.3g}" if usd else ""]
    return [
        *first,
        _CLOCKS[found.clock],
        seconds(row.median_a),
        seconds(row.median_b),
        f"{found.ratio:.3f}",
        f"{found.low:.3f} to {found.high:.3f}",
        _noise(found.noise),
        f"{found.p:.1g}",
        f"{row.verdict}: {row.reason}" if row.reason else row.verdict,
        *costs * has_prices,
    ]
