"""The commands ``rlcore bench ...``."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlcore.console import PLAIN, AsJson, DeviceName, print_json, print_table
from rlcore.errors import BenchError, InvalidInputError

if TYPE_CHECKING:
    from rlcore.bench.case import Case
    from rlcore.bench.compare import Comparison, Row
    from rlcore.bench.estimate import Durations
    from rlcore.bench.result import Calibration, CaseResult, Effort, Record

bench = typer.Typer(help="Measure this machine, compare machines and runs.", **PLAIN)


@bench.command("list")
def list_cases(as_json: AsJson = False) -> None:
    """List the benchmark cases."""
    from rlcore.bench.case import load_cases

    rows = [[case.name, case.effort, case.description] for case in load_cases().values()]
    if as_json:
        print_json([dict(zip(("name", "effort", "description"), row, strict=True)) for row in rows])
    else:
        print_table(["case", "from", "what is measured"], rows)


@bench.command("run")
def run(
    cases: Annotated[list[str] | None, typer.Argument(help='Such as "kernels/linear_loss", or "kernels".')] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File for the record.")] = None,
    device: DeviceName = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: minutes on an accelerator.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything, cases that take minutes too.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often all is measured again, in new processes; more, less noise.")
    ] = None,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure the limits of this machine again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run benchmark cases (all when none is named) and write the record as JSON.

    A case that is named runs whatever the kind of run. Exit code 1 when one failed or ran out of memory.
    """
    from dataclasses import replace

    from rlcore.bench.case import select_cases
    from rlcore.bench.estimate import Durations
    from rlcore.bench.isolated import Isolated, with_limits
    from rlcore.bench.result import encode
    from rlcore.bench.runner import PLANS, Run, check_can_write
    from rlcore.registry import get_device

    if quick and full:
        raise InvalidInputError("--quick and --full contradict each other; give one of them")
    effort: Effort = "quick" if quick else "full" if full else "standard"
    plan, on = PLANS[effort], get_device(device)
    plan = plan if rounds is None else replace(plan, rounds=rounds)
    found = select_cases(cases or [])
    left_out = [case for case in found if not cases and plan.leaves_out(case)]
    chosen = [case for case in found if case not in left_out]
    path = output or Path(f"rlcore-bench-{on.spec.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
    check_can_write(path)
    durations = Durations(on.name, plan)
    minutes = max(1, round(durations.total(chosen) / 60))
    print(f"{len(chosen)} cases on {on.name}, about {minutes} min ({effort})", file=sys.stderr)
    try:
        with Isolated(on.name) as isolated, _progress(durations, chosen, plan.rounds) as report:

            def run_case(case: Case) -> list[CaseResult]:
                durations.begin(case)
                results = isolated.run_case(case, plan.sampling)
                durations.end(case)
                return results

            record = with_limits(isolated, isolated.new_record(effort), recalibrate)
            done = Run(record=record, path=path, run=run_case, rounds=plan.rounds, report=report).cases(
                chosen, left_out
            )
    except KeyboardInterrupt:
        if path.exists():
            print(path, file=sys.stderr)
        raise
    durations.keep()
    if as_json:
        sys.stdout.write(encode(done).decode())
    else:
        _print_results(done)
        sys.stdout.flush()
    print(path, file=sys.stderr)
    raise typer.Exit(int(any(result.status in ("fail", "oom") for result in done.cases)))


@bench.command("compare")
def compare_records(
    records: Annotated[
        list[Path], typer.Argument(help="Two records or more; the first is what others are compared with.")
    ],
    price: Annotated[
        list[str] | None,
        typer.Option(help="USD an hour for one device of a record, by its file name.", metavar="NAME=USD"),
    ] = None,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 1 when anything is slower, or no longer passes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: what differs in machine and software, then the ratio of each result.

    A file may also be one of pytest-benchmark, made with -p rlcore.bench.pytest_plugin --benchmark-json.
    """
    from dataclasses import asdict

    from rlcore.bench.compare import compare, parse_prices
    from rlcore.bench.export import read_any

    if len(records) < 2:
        raise InvalidInputError(f"compare takes two records or more, got {len(records)}")
    names = [path.stem for path in records]
    prices = parse_prices(price or [], names)
    first, *others = [read_any(path) for path in records]
    found = [
        compare(first, other, names=(names[0], name), prices=prices)
        for other, name in zip(others, names[1:], strict=True)
    ]
    if fail_on_regression and not all(one.is_same_device for one in found):
        raise InvalidInputError(
            "--fail-on-regression takes runs of the same kind of device; these are of different ones"
        )
    if as_json:
        print_json([asdict(one) | {"statement": one.statement} for one in found])
    else:
        for one in found:
            _print_comparison(one)
    raise typer.Exit(int(fail_on_regression and any(one.regressions for one in found)))


@bench.command("export")
def export_record(
    record: Annotated[Path, typer.Argument(help="A record.")],
    form: Annotated[Literal["csv", "pytest-benchmark"], typer.Option("--format", help="What to make of it.")] = "csv",
) -> None:
    """Print a record as CSV, or as JSON that pytest-benchmark compares."""
    from rlcore.bench.export import to_csv, to_pytest_benchmark
    from rlcore.bench.result import read

    make = {"csv": to_csv, "pytest-benchmark": to_pytest_benchmark}[form]
    sys.stdout.write(make(read(record)))


@bench.command("report")
def report_records(
    records: Annotated[
        list[Path], typer.Argument(help="One record or more; the first is what others are compared with.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File for the page.")] = Path("report.html"),
    price: Annotated[
        list[str] | None,
        typer.Option(help="USD an hour for one device of a record, by its file name.", metavar="NAME=USD"),
    ] = None,
) -> None:
    """Make one self-contained HTML page of one run or several."""
    from rlcore.atomic import write_file
    from rlcore.bench.compare import parse_prices
    from rlcore.bench.report import Run, render
    from rlcore.bench.result import read

    prices = parse_prices(price or [], [path.stem for path in records])
    page = render([Run(path.stem, read(path), prices.get(path.stem)) for path in records])
    try:
        write_file(output, page.encode())
    except OSError as error:
        raise BenchError(f"cannot write the report {output}: {error.strerror}") from error
    print(output, file=sys.stderr)


def _print_comparison(found: Comparison) -> None:
    rows = [[name, *pair] for name, pair in found.differences.items()]
    print_table(["differs", found.name_a, found.name_b], rows or [["nothing recorded", "", ""]])
    print(found.statement + "\n")
    header = ["case", "implementation", found.name_a, found.name_b, "ratio", "99 % interval", "noise", "p", "verdict"]
    prices = any(row.cost_ratio for row in found.rows)
    print_table(header + ["cost ratio", "USD/M tokens"] * prices, [_compared(row, prices) for row in found.rows])
    counts = Counter(row.verdict for row in found.rows)
    shown = [f"{counts[verdict]} {verdict}" for verdict in ("about equal", "faster", "slower", *sorted(counts))]
    mean = "" if found.geometric_mean is None else f"; geometric mean of the ratios {found.geometric_mean:.3f}"
    print(", ".join(dict.fromkeys(shown)) + mean)


def _compared(row: Row, has_prices: bool) -> list[str]:
    from rlcore.bench.text import seconds

    if row.difference is None or row.median_a is None or row.median_b is None:
        return [row.case, row.implementation, "", "", "", "", "", "", f"{row.verdict}: {row.reason}"] + [
            ""
        ] * 2 * has_prices
    found = row.difference
    usd = row.usd_per_million_tokens
    costs = ["" if row.cost_ratio is None else f"{row.cost_ratio:.2f}", f"{usd[0]:.3g} / {usd[1]:.3g}" if usd else ""]
    return [
        row.case,
        row.implementation,
        seconds(row.median_a),
        seconds(row.median_b),
        f"{found.ratio:.3f}",
        f"{found.low:.3f} to {found.high:.3f}",
        f"{found.noise:.1%}",
        f"{found.p:.1g}",
        row.verdict,
        *costs * has_prices,
    ]


@contextlib.contextmanager
def _progress(durations: Durations, cases: list[Case], rounds: int) -> Iterator[Any]:
    """A bar with the time left on a terminal; elsewhere a line for each case when it ends first."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    seen: set[str] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=sum(map(durations.of, cases)))

        def report(case: Case, results: list[CaseResult]) -> None:
            left = rounds if any(result.has("first_run") for result in results) else 1  # there is no other round of it
            bar.update(task, advance=durations.of(case) / left, description=case.name)
            if case.name not in seen:
                seen.add(case.name)
                for result in results:
                    line = "  ".join(cell for cell in _row(result, None)[:4] if cell)
                    bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield report


def _print_results(record: Record) -> None:
    header = ["case", "implementation", "status", "median", "n", "share", "marks"]
    print_table(header, [_row(result, record.calibration) for result in record.cases])


def _row(result: CaseResult, calibration: Calibration | None) -> list[str]:
    from rlcore.bench.limits import share_of_limit
    from rlcore.bench.text import seconds

    if result.status != "pass":
        return [result.name, result.implementation, result.status, result.reason.partition("\n")[0], "", "", ""]
    samples = result.samples("time")
    share = share_of_limit(result, calibration)
    return [
        result.name,
        result.implementation,
        "pass",
        seconds(statistics.median(samples)),
        str(len(samples)),
        f"{share.value:.3g} of {share.limit}" if share else "n/a",
        "; ".join(result.marks),
    ]
