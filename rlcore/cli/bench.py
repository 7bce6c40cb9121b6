"""The commands ``rlcore bench ...``."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlcore.cli.bench_output import print_comparison, print_results, progress
from rlcore.cli.console import PLAIN, AsJson, DeviceName, check_free, given_path, print_json, print_table, write_json
from rlcore.errors import BenchError, InvalidInputError
from rlcore.torch_import import import_torch

if TYPE_CHECKING:
    from rlcore.bench.record import Effort

Force = Annotated[bool, typer.Option("--force", help="Replace the file of -o, if there is one.")]

bench = typer.Typer(help="Measure this machine, compare machines and runs.", **PLAIN)


@bench.command("list")
def list_cases(as_json: AsJson = False) -> None:
    """List the benchmark cases."""
    import_torch()  # else those that need it are only missing
    from rlcore.bench.case import load_cases

    cases = load_cases().values()
    if as_json:
        names = ("name", "effort", "estimate_s", "device_estimate_s", "description")
        print_json([{name: getattr(case, name) for name in names} for case in cases])
    else:
        seconds = [[case.estimate_s, case.device_estimate_s or case.estimate_s] for case in cases]
        rows = [
            [case.name, case.effort, *(f"{one:g} s" for one in pair), case.description]
            for case, pair in zip(cases, seconds, strict=True)
        ]
        print_table(["case", "in runs from", "a round, about", "on a device", "what is measured"], rows)


@bench.command("run")
def run(
    cases: Annotated[list[str] | None, typer.Argument(help='Such as "kernels/linear_loss", or "kernels".')] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", parser=given_path, metavar="PATH", help="File for the record.")
    ] = None,
    device: DeviceName = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: minutes on an accelerator.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything, cases that take minutes too.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="How often all is measured again, in new processes; more, less noise."),
    ] = None,
    within: Annotated[
        float | None, typer.Option(min=0.1, max=525_600, help="Minutes the run may last; what does not fit is skipped.")
    ] = None,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Keep what the file of -o holds; run what it has no number of.")
    ] = False,
    force: Force = False,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure the limits of this machine again.")
    ] = False,
    note: Annotated[
        str | None, typer.Option(help="What to know of the machine: kept in the record, shown with its results.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run benchmark cases (all when none is named) and write the record as JSON.

    A case that is named runs whatever the kind of run. Exit code 1 when one failed or ran out of memory.
    """
    started = time.monotonic()
    import_torch()
    from dataclasses import replace

    from rlcore.bench.case import select_cases
    from rlcore.bench.measurement.isolated import Isolated, with_limits
    from rlcore.bench.record import encode, read
    from rlcore.bench.run import PLANS, BenchRun, Durations, TimeLimit, check_can_write, continued, noted
    from rlcore.registry import get_device

    if quick and full:
        raise InvalidInputError("--quick and --full contradict each other; give one of them")
    if go_on:
        _check_continued(output, force=force)
    effort: Effort = "quick" if quick else "full" if full else "standard"
    plan, on = PLANS[effort], get_device(device)
    plan = plan if rounds is None else replace(plan, rounds=rounds)
    found = select_cases(cases or [])
    chosen, left_out = (found, []) if cases else plan.part(found)
    path = output or Path(f"rlcore-bench-{on.spec.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
    check_can_write(path)
    check_free("-o", path, force=force or go_on, others="--continue to go on with it, ")
    earlier = read(path) if go_on and path.exists() else None
    durations = Durations(on, plan)
    limit = TimeLimit(within, durations, started)
    minutes = max(1, round(durations.total(chosen) / 60))
    skipping = "" if within is None else f"; what does not fit into {within:g} min is skipped"
    number = f"{len(chosen)} case{'s' * (len(chosen) != 1)}"
    print(f"{number} on {on.name}, about {minutes} min ({effort}){skipping}", file=sys.stderr)
    with (
        _interrupted_by_sigterm(),
        progress(durations, chosen, plan.rounds) as shown,
        Isolated(on.name, on_step=shown.step) as isolated,
    ):
        record = noted(isolated.new_record(effort), note)
        record = with_limits(isolated, continued(earlier, record) if earlier else record, recalibrate)
        running = BenchRun(
            record=record,
            path=path,
            run=lambda case: isolated.run_case(case, plan.sampling, limit.left_s),
            so_far=isolated.so_far,
            rounds=plan.rounds,
            report=shown.report,
            has_time_for=limit.has_time_for,
        )
        if stay := running.settled.intersection(case.name for case in chosen):
            print(f"{len(stay)} cases stay as another commit, or files with changes, had them", file=sys.stderr)
        try:
            done = running.cases(chosen, left_out)
        except KeyboardInterrupt:
            print(f"interrupted; {_rest(output, path, force=force)}\n{path}", file=sys.stderr)
            raise
        finally:
            durations.keep(running.record)
    if as_json:
        write_json(encode(done).decode())
    else:
        print_results(done)
        sys.stdout.flush()
    print(path, file=sys.stderr)
    raise typer.Exit(int(any(result.status in ("fail", "oom") for result in done.cases)))


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is as Ctrl-C: where ``timeout`` or a queue of jobs ends the run, what is done is written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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

    from rlcore.bench.compare import compare, parse_prices, run_names
    from rlcore.bench.reports.export import read_any

    if len(records) < 2:
        raise InvalidInputError(f"compare takes two records or more, got {len(records)}")
    names = run_names(records)
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
            print_comparison(one)
    if fail_on_regression and not all(one.compared or one.regressions for one in found):
        raise BenchError(
            "--fail-on-regression found no result that both runs have and that can be compared; give both the same "
            "cases, and rounds enough"
        )
    raise typer.Exit(int(fail_on_regression and any(one.regressions for one in found)))


@bench.command("export")
def export_record(
    record: Annotated[Path, typer.Argument(help="A record.")],
    form: Annotated[Literal["csv", "pytest-benchmark"], typer.Option("--format", help="What to make of it.")] = "csv",
) -> None:
    """Print a record as CSV, or as JSON that pytest-benchmark compares."""
    from rlcore.bench.record import read
    from rlcore.bench.reports.export import to_csv, to_pytest_benchmark

    make = {"csv": to_csv, "pytest-benchmark": to_pytest_benchmark}[form]
    sys.stdout.write(make(read(record)))


@bench.command("report")
def report_records(
    records: Annotated[
        list[Path], typer.Argument(help="One record or more; the first is what others are compared with.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", parser=given_path, metavar="PATH", help="File for the page.")
    ] = Path("report.html"),
    price: Annotated[
        list[str] | None,
        typer.Option(help="USD an hour for one device of a record, by its file name.", metavar="NAME=USD"),
    ] = None,
    force: Force = False,
) -> None:
    """Make one self-contained HTML page of one run or several."""
    from rlcore.atomic import write_file
    from rlcore.bench.compare import parse_prices, run_names
    from rlcore.bench.record import read
    from rlcore.bench.reports.answers import ReportRun
    from rlcore.bench.reports.page import render

    names = run_names(records)
    if output.exists() and any(record.exists() and record.samefile(output) for record in records):
        raise InvalidInputError(f"-o {output} is one of the records; give another file for the page")
    check_free("-o", output, force=force)
    prices = parse_prices(price or [], names)
    page = render([ReportRun(name, read(path), prices.get(name)) for name, path in zip(names, records, strict=True)])
    try:
        write_file(output, page.encode())
    except OSError as error:
        raise BenchError(f"cannot write the report {output}: {error.strerror}") from error
    print(output, file=sys.stderr)


def _rest(output: Path | None, path: Path, *, force: bool) -> str:
    """Return how an interrupted run is gone on with; without -o the same command would begin another record."""
    how = "--continue" if output else f"-o {path} --continue"
    return f"with {how}{' instead of --force' if force else ''} the same command does the rest"


def _check_continued(output: Path | None, *, force: bool) -> None:
    if force:
        raise InvalidInputError("--continue keeps what the file of -o holds, and --force replaces it; give one of them")
    if output is None:
        raise InvalidInputError("--continue goes on with the record of -o; give that file")
