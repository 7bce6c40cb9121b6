"""The command ``rlcore``: parses, calls a function, prints. The work is done elsewhere.

Standard output is the result, with ``--json`` nothing but JSON; progress and the log go to standard error.
Exit code 0: done; 1: an error of rlcore, in one line; 2: wrong usage; 130: interrupted. Each command imports
what it needs, so that ``rlcore --help`` loads no torch.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import sys
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore import __version__
from rlcore.errors import InvalidInputError, RlcoreError
from rlcore.settings import Settings

if TYPE_CHECKING:
    from rlcore.bench.result import CaseResult
    from rlcore.engines.launchers.living import LivingProcess

_PLAIN: dict[str, Any] = {"add_completion": False, "no_args_is_help": True, "pretty_exceptions_enable": False}

app = typer.Typer(help="The hardware layer under RL post-training of language models.", **_PLAIN)
bench = typer.Typer(help="Measure this machine and its kernels.", **_PLAIN)
ops = typer.Typer(help="Look at the operators.", **_PLAIN)
app.add_typer(bench, name="bench")
app.add_typer(ops, name="ops")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
DeviceName = Annotated[str | None, typer.Option("--device", help='Such as "cpu" or "cuda:1"; else the default one.')]


def main() -> None:
    try:
        app()
    except RlcoreError as error:
        sys.exit(f"rlcore: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback()
def configure() -> None:
    """The library leaves logging alone; here, where it is the program, it logs to standard error."""
    logger = logging.getLogger("rlcore")
    logger.setLevel(Settings.from_env().log_level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]


# ------------------------------------------------------------------------------------------------- commands


@app.command()
def quickstart(
    model: Annotated[Path | None, typer.Option(help="Folder of a Hugging Face causal language model.")] = None,
    device: DeviceName = None,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps in all, those before --resume included.")] = 100,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("outputs/quickstart"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    shuffle_rewards: Annotated[
        bool, typer.Option("--shuffle-rewards", help="The control that learns nothing.")
    ] = False,
) -> None:
    """Train a small language model by reinforcement learning, end to end."""
    from rlcore.quickstart.config import QuickstartConfig
    from rlcore.quickstart.run import run

    config = QuickstartConfig(
        model=model,
        device=device,
        seed=seed,
        steps=steps,
        output=output,
        resume=resume,
        shuffle_rewards=shuffle_rewards,
    )
    raise typer.Exit(run(config))


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument(help='Such as "cuda" or "cuda:1": show every member of it.')] = None,
    as_json: AsJson = False,
) -> None:
    """List the devices and the plugins that failed; or what one device can do, member by member."""
    from rlcore import inventory

    if name is None:
        _list_devices(as_json)
        return
    found = inventory.describe(name)
    if as_json:
        _print_json(asdict(found))
        return
    about = [["name", found.name], ["vendor", found.vendor]]
    about += [[field, str(value)] for field, value in asdict(found.properties).items() if field != "name"]
    about.insert(2, ["product", found.properties.name])
    _print_table(["device", ""], about)
    rows = [[member, how.support, how.evidence, how.reason] for member, how in found.capabilities.items()]
    _print_table(["member", "support", "evidence", "reason"], rows)


def _list_devices(as_json: bool) -> None:
    from rlcore.inventory import kinds, summary
    from rlcore.registry import registry

    found = kinds()
    failed = [record for record in registry().plugins if record.error]
    if as_json:
        plugins = [
            {
                "name": r.name,
                "distribution": r.distribution,
                "version": r.version,
                "stage": r.stage,
                "error": r.reason,
            }
            for r in failed
        ]
        _print_json({"devices": [kind.as_dict() for kind in found], "failed_plugins": plugins})
        return
    rows = []
    for kind in found:
        info, members = kind.info, summary(kind.capabilities) if kind.capabilities else kind.error
        rows.append([info.name, info.vendor, str(info.count), info.plugin, members, info.reason or "available"])
    _print_table(["device", "vendor", "count", "plugin", "members", "state"], rows)
    if failed:
        _print_table(
            ["failed plugin", "distribution", "stage", "error"],
            [[r.name, f"{r.distribution} {r.version}", r.stage, r.reason] for r in failed],
        )


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check the machine, the packages, the plugins and each device; say what to do about what is wrong.

    Exit code 1 when a check failed, 0 otherwise, warnings included.
    """
    from rlcore.doctor.examine import examine

    report = examine()
    if as_json:
        _print_json(asdict(report))
    else:
        rows = [[check.check, check.status, check.found, check.fix] for check in report.checks]
        _print_table(["check", "", "found", "what to do"], rows)
    raise typer.Exit(int(report.status == "FAIL"))


@app.command()
def ps(
    as_json: AsJson = False,
    kill: Annotated[int | None, typer.Option(help="End the worker process with this id.", metavar="PID")] = None,
) -> None:
    """List your worker processes, or end one; its engine then raises WorkerDiedError."""
    from rlcore.engines.launchers import living

    found = living.living_processes() if kill is None else [living.kill(kill)]
    if as_json:
        _print_json([_worker(process) for process in found])
        return
    header = ["pid" if kill is None else "ended", "parent", "device", "engines", "memory", "age"]
    _print_table(header, [_worker_row(process) for process in found])


@app.command()
def version(as_json: AsJson = False) -> None:
    """Show the versions of rlcore, Python and what it works with."""
    from rlcore.bench.system import installed_versions, source_commit

    found = {"rlcore": __version__, "commit": source_commit(), "python": platform.python_version()}
    found |= installed_versions()
    if as_json:
        _print_json(found)
    else:
        _print_table(["package", "version"], [[name, value or "unknown"] for name, value in found.items()])


@bench.command("list")
def bench_list(as_json: AsJson = False) -> None:
    """List the benchmark cases."""
    from rlcore.bench.case import load_cases

    rows = [[case.name, case.description] for case in load_cases().values()]
    if as_json:
        _print_json([dict(zip(("name", "description"), row, strict=True)) for row in rows])
    else:
        _print_table(["case", "what is measured"], rows)


@bench.command("run")
def bench_run(
    cases: Annotated[list[str] | None, typer.Argument(help='Such as "kernels/linear_loss", or "kernels".')] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File for the record.")] = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Run benchmark cases (all when none is named) and write the record as JSON."""
    from rlcore.bench.case import select_cases
    from rlcore.bench.result import encode
    from rlcore.bench.runner import run_cases
    from rlcore.registry import get_device

    chosen, on = select_cases(cases or []), get_device(device)
    path = output or Path(f"rlcore-bench-{on.spec.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
    print(f"{len(chosen)} cases on {on.name}", file=sys.stderr)
    try:
        record = run_cases(chosen, on, path, report=_report)
    except KeyboardInterrupt:
        print(path, file=sys.stderr)
        raise
    print(path, file=sys.stderr)
    if as_json:
        sys.stdout.write(encode(record).decode())
    else:
        _print_table(["case", "implementation", "status", "median", "n"], [_row(result) for result in record.cases])
    raise typer.Exit(int(any(result.status in ("fail", "oom") for result in record.cases)))


@ops.command("explain")
def ops_explain(
    op: Annotated[str, typer.Argument(help='Such as "linear_loss".')],
    device: DeviceName = None,
    dtype: Annotated[str, typer.Option(help="Of hidden states or logits.")] = "bfloat16",
    hidden_size: Annotated[int, typer.Option(min=0, help="0 for operators that take logits.")] = 2048,
    vocab_size: Annotated[int, typer.Option(min=1)] = 151_936,
    option: Annotated[list[str] | None, typer.Option(help='Feature in use, such as "entropy"; repeat.')] = None,
    implementation: Annotated[str | None, typer.Option(help="Ask for this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which implementation of an operator would run, and why each other would not."""
    import torch

    from rlcore.kernels.dispatch import Query, choose
    from rlcore.registry import get_device

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise InvalidInputError(f"--dtype must be a torch dtype such as bfloat16 or float32, got {dtype!r}")
    query = Query(get_device(device).type, torch_dtype, hidden_size, vocab_size, frozenset(option or ()))
    choice = choose(op, query, implementation)
    refused = [{"implementation": name, "reason": reason} for name, reason in choice.refused]
    if as_json:
        _print_json({"op": op, "implementation": choice.implementation, "refused": refused})
    else:
        rows = [[choice.implementation, "runs"], *([r["implementation"], r["reason"]] for r in refused)]
        _print_table([op, ""], rows)


# ------------------------------------------------------------------------------------------------- printing


_GOOD = ("available", "native", "OK", "pass", "runs")
_BAD = ("fail", "FAIL", "oom")
_MISSING = ("blocked", "emulated", "skipped", "unsupported", "WARN")
_COLOURS = dict.fromkeys(_GOOD, "green") | dict.fromkeys(_BAD, "red") | dict.fromkeys(_MISSING, "yellow")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, ""), overflow="fold") for cell in row))
    # A pipe has no width: each row stays on its line, so that grep and awk see it whole.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def _report(result: CaseResult) -> None:
    print("  ".join(_row(result)), file=sys.stderr)


def _row(result: CaseResult) -> list[str]:
    if result.status != "pass":
        return [result.name, result.implementation, result.status, result.reason.partition("\n")[0], ""]
    samples = result.samples("time")
    return [
        result.name,
        result.implementation,
        "pass",
        _seconds(statistics.median(samples)),
        str(len(samples)),
    ]


def _worker(process: LivingProcess) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "parent": process.parent,
        "device": process.device,
        "engines": process.engines,
        "resident_bytes": process.resident_bytes,
        "age_s": round(process.age_s, 1),
    }


def _worker_row(process: LivingProcess) -> list[str]:
    memory, age = f"{process.resident_bytes / 2**20:.0f} MiB", str(timedelta(seconds=int(process.age_s)))
    return [str(process.pid), str(process.parent), process.device, ", ".join(process.engines), memory, age]


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
