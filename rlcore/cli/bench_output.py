"""The output of the commands ``rlcore bench ...``: progress, results, comparisons."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rlcore.cli.console import console_of, print_table, print_text

if TYPE_CHECKING:
    from rlcore.bench.case import Case
    from rlcore.bench.compare import Comparison
    from rlcore.bench.record import CaseResult, Record
    from rlcore.bench.run import Durations


class _Shown(NamedTuple):
    report: Callable[[Case, list[CaseResult]], None]
    step: Callable[[str], None]


@contextlib.contextmanager
def progress(durations: Durations, cases: list[Case], rounds: int) -> Iterator[_Shown]:
    """Show a progress bar on a terminal; elsewhere a line for each step of a case and its first result."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from rlcore.bench.reports.tables import results_table

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
                for row in results_table(results, None).rows:
                    bar.console.print("  ".join(filter(None, row[:5])), markup=False, highlight=False, soft_wrap=True)

        def step(at: str) -> None:
            if not console.is_terminal:
                console.print(at, markup=False, highlight=False, soft_wrap=True)

        yield _Shown(report, step)


def print_results(record: Record) -> None:
    """Print a line for each result, the number of skipped cases by reason, and the targets of this device."""
    from rlcore.bench.reports.tables import results_table, targets_table

    done = [result for result in record.cases if result.status != "skipped"]
    columns = ("case", "implementation", "sizes", "status", "median", "n", "share", "marks")
    print_table(*results_table(done, record.calibration).only(*columns))
    if record.calibration and record.calibration.marks:
        print_text(f"limits may be too low: {'; '.join(record.calibration.marks)}")
    skipped = Counter(result.reason for result in record.cases if result.status == "skipped")
    for reason, number in skipped.items():
        print_text(f"{number} cases skipped: {reason}")
    if (targets := targets_table(record)).rows:
        print_table(*targets)


def print_comparison(found: Comparison) -> None:
    """Print the differences of two runs, a line for each result, and the number of results by verdict."""
    from rlcore.bench.reports.tables import compared_table

    rows = [[name, *pair] for name, pair in found.differences.items()]
    print_table(["differs", found.name_a, found.name_b], rows or [["nothing recorded", "", ""]])
    print_text(found.statement + "\n")
    table = compared_table(found)
    print_table(*table)
    counts = Counter(row.verdict for row in found.rows)
    counted = [f"{counts[verdict]} {verdict}" for verdict in ("about equal", "faster", "slower", *sorted(counts))]
    mean = "" if found.geometric_mean is None else f"; geometric mean of the ratios {found.geometric_mean:.3f}"
    print_text(", ".join(dict.fromkeys(counted)) + mean)
    both = {row[0] for row in table.rows}
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
