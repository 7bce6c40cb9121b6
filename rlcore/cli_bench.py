"""The commands ``rlcore bench ...``."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore.console import PLAIN, AsJson, DeviceName, print_json, print_table
from rlcore.errors import InvalidInputError

if TYPE_CHECKING:
    from rlcore.bench.case import Case
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
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure the limits of this machine again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run benchmark cases (all when none is named) and write the record as JSON.

    A case that is named runs whatever the kind of run. Exit code 1 when one failed or ran out of memory.
    """
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
            bar.update(task, advance=durations.of(case) / rounds, description=case.name)
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

    if result.status != "pass":
        return [result.name, result.implementation, result.status, result.reason.partition("\n")[0], "", "", ""]
    samples = result.samples("time")
    share = share_of_limit(result, calibration)
    return [
        result.name,
        result.implementation,
        "pass",
        format_seconds(statistics.median(samples)),
        str(len(samples)),
        f"{share.value:.3g} of {share.limit}" if share else "n/a",
        "; ".join(result.marks),
    ]


def format_seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
