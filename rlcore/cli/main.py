"""The command ``rlcore``: parses, calls a function, prints. The work is done elsewhere.

Standard output is the result, with ``--json`` nothing but JSON; progress and the log go to standard error.
Exit code 0: done; 1: an error of rlcore, in one line; 2: wrong usage; 130: interrupted. Each command imports
what it needs, so that ``rlcore --help`` loads no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import platform
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer

from rlcore import __version__
from rlcore.cli.bench import bench
from rlcore.cli.chaos import chaos
from rlcore.cli.checkpoint import checkpoint
from rlcore.cli.console import PLAIN, AsJson, DeviceName, given_path, print_json, print_table
from rlcore.cli.parity import parity
from rlcore.cli.plan import plan
from rlcore.cli.trace import trace
from rlcore.cli.train import train
from rlcore.cli.tune import tune
from rlcore.errors import RlcoreError, printable
from rlcore.settings import Settings
from rlcore.torch_import import import_torch

if TYPE_CHECKING:
    from rlcore.engines.launchers.ray.listing import ListedProcess
    from rlcore.engines.launchers.running import RunningProcess

_INTERRUPTED = 130
_OF_THE_OUTPUT = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""A write to standard output fails with one of these: nobody reads it, or the disk is full."""

_ADVICE = {
    errno.EACCES: "give a path that you may use, or let its owner change the permissions",
    errno.EPERM: "give a path that you may use, or let its owner change the permissions",
    errno.EROFS: "give a path on a disk that can be written",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "give a path whose parts but the last are folders",
    errno.ENOENT: "give the path of something that is there",
    errno.ENOSPC: "free space there, or give a path on another disk",
    errno.EDQUOT: "free space there, or give a path on another disk",
    errno.ELOOP: "mend its links, or give another path",
}
"""Ends the line about a path that the system refuses, by the number of the error."""

app = typer.Typer(help="The hardware layer under RL post-training of language models.", **PLAIN)
ops = typer.Typer(help="Look at the operators.", **PLAIN)
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(ops, name="ops")
app.command("chaos")(chaos)
app.command("parity")(parity)
app.command("plan")(plan)
app.command("trace", context_settings={"allow_interspersed_args": False})(trace)
app.command("train")(train)
app.command("tune")(tune)


def main() -> None:
    if sys.stdout is None:  # it was closed: nobody wants the result
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    try:
        _run()
    except RlcoreError as error:
        sys.exit(f"rlcore: {printable(str(error))}")
    except OSError as error:
        if error.filename is not None:
            logging.getLogger("rlcore").debug("the error was raised here", exc_info=error)
            sys.exit(f"rlcore: {printable(_told(error))}")
        if error.errno not in _OF_THE_OUTPUT:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # or Python would try again at the end
        if error.errno == errno.EPIPE:  # such as `rlcore bench list | head -1`
            sys.exit(1)
        sys.exit(f"rlcore: cannot write the result to standard output: {error.strerror}; what is there is not whole")
    except KeyboardInterrupt:
        _leave_at_once()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            _leave_at_once()
        raise


def _told(error: OSError) -> str:
    """Return one line about a file that the system does not let us use."""
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return f"{path}: {error.strerror}; {_ADVICE.get(error.errno or 0, 'give another path')}"


def _run() -> None:
    try:
        app()
    finally:
        sys.stdout.flush()


def _leave_at_once() -> NoReturn:
    """End the process without the garbage collection of torch and transformers, which takes over a second."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(_INTERRUPTED)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def configure(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the versions, as the command version does.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Log to standard error: rlcore is the program here, whereas the library leaves logging alone."""
    logger = logging.getLogger("rlcore")
    logger.setLevel(Settings.from_env().log_level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]


# ------------------------------------------------------------------------------------------------- commands


@app.command()
def quickstart(
    model: Annotated[
        Path | None,
        typer.Option(parser=given_path, metavar="PATH", help="Folder of a Hugging Face causal language model."),
    ] = None,
    device: DeviceName = None,
    executor: Annotated[str | None, typer.Option(help="What samples: hf, vllm, or sglang.", show_default="hf")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Of everything drawn.", show_default="0")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Threads of the host; unless given 1, or torch's choice with --model."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps in all, those before --resume included.", show_default="100"),
    ] = None,
    output: Annotated[Path, typer.Option(parser=given_path, metavar="PATH", help="Folder of the run.")] = Path(
        "outputs/quickstart"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output folder, with the options that it has.")
    ] = False,
    launcher: Annotated[
        str | None, typer.Option(help="How workers run, such as process, or ray; unless given in this process.")
    ] = None,
    shuffle_rewards: Annotated[
        bool | None, typer.Option("--shuffle-rewards", help="The control that learns nothing.", show_default=False)
    ] = None,
) -> None:
    """Train a small language model by reinforcement learning, end to end."""
    import_torch()
    from rlcore.quickstart.config import QuickstartConfig
    from rlcore.quickstart.run import run

    options = {
        "model": model and model.absolute(),
        "device": device,
        "executor": executor,
        "launcher": launcher,
        "seed": seed,
        "threads": threads,
        "steps": steps,
        "shuffle_rewards": shuffle_rewards,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    config = QuickstartConfig.resuming(output, **given) if resume else QuickstartConfig(output=output, **given)
    raise typer.Exit(run(config))


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument(help='Such as "cuda" or "cuda:1": show every member of it.')] = None,
    as_json: AsJson = False,
) -> None:
    """List the devices and the plugins that failed; or what one device can do, member by member."""
    from rlcore.cli import inventory

    if name is None:
        _list_devices(as_json)
        return
    found = inventory.describe(name)
    if as_json:
        print_json(asdict(found))
        return
    about = [["name", found.name], ["vendor", found.vendor]]
    about += [[field, str(value)] for field, value in asdict(found.properties).items() if field != "name"]
    about.insert(2, ["product", found.properties.name])
    print_table(["device", ""], about)
    rows = [[member, how.support, how.evidence, how.reason] for member, how in found.capabilities.items()]
    print_table(["member", "support", "evidence", "reason"], rows)


def _list_devices(as_json: bool) -> None:
    from rlcore.cli.inventory import kinds, summary
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
        print_json({"devices": [kind.as_dict() for kind in found], "failed_plugins": plugins})
        return
    rows = []
    for kind in found:
        info, members = kind.info, summary(kind.capabilities) if kind.capabilities else kind.error
        rows.append([info.name, info.vendor, str(info.count), info.plugin, members, info.reason or "available"])
    print_table(["device", "vendor", "count", "plugin", "members", "state"], rows)
    if failed:
        print_table(
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
        print_json(asdict(report))
    else:
        _print_findings([[check.check, check.status, check.found, check.fix] for check in report.checks])
    raise typer.Exit(int(report.status == "FAIL"))


def _print_findings(rows: list[list[str]]) -> None:
    """Print the checks; on a terminal the commands stand below the table, because a folded one cannot be pasted."""
    if not sys.stdout.isatty():
        print_table(["check", "", "found", "what to do"], rows)
        return
    print_table(["check", "", "found"], [row[:3] for row in rows])
    for check, status, _, fix in rows:
        if fix:
            print(printable(f"\n{status} {check}: what to do\n{fix}"))


@app.command()
def ps(
    as_json: AsJson = False,
    kill: Annotated[
        int | None, typer.Option(help="End the worker process of this host with this id.", metavar="PID")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help='List those of all hosts of the Ray cluster there; "auto" is that of this host.')
    ] = None,
) -> None:
    """List your worker processes, or end one; its engine then raises WorkerDiedError."""
    from rlcore.engines.launchers import running

    if address is not None:
        if kill is not None:
            raise typer.BadParameter("run it on the host of the process, without --address", param_hint="--kill")
        _list_cluster(address, as_json)
        return
    found = running.running_processes() if kill is None else [running.kill(kill)]
    if as_json:
        print_json([_worker(process) for process in found])
        return
    header = ["pid" if kill is None else "ended", "parent", "device", "engines", "memory", "age"]
    print_table(header, [_worker_row(process) for process in found])


def _list_cluster(address: str, as_json: bool) -> None:
    """Print the worker processes of all hosts; exit code 1 when one of them could not be asked."""
    import_torch()
    from rlcore.engines.launchers.ray.listing import processes_of_cluster

    listings = processes_of_cluster(address)
    if as_json:
        print_json([msgspec.to_builtins(listing) for listing in listings])
    else:
        header = ["host", "pid", "parent", "device", "engines", "memory", "age"]
        print_table(header, [[one.host, *_worker_row(process)] for one in listings for process in one.processes])
        for one in listings:
            if one.error:
                print(printable(f"{one.host} could not be asked: {one.error}"), file=sys.stderr)
    raise typer.Exit(int(any(one.error for one in listings)))


@app.command()
def version(as_json: AsJson = False) -> None:
    """Show the versions of rlcore, Python and what it works with."""
    from rlcore.bench.measurement.system import installed_versions, source_commit

    found = {"rlcore": __version__, "commit": source_commit(), "python": platform.python_version()}
    found |= installed_versions()
    if as_json:
        print_json(found)
    else:
        print_table(["package", "version"], [[name, value or "unknown"] for name, value in found.items()])


@app.command()
def examples(
    folder: Annotated[Path, typer.Argument(parser=given_path, metavar="FOLDER", help="Folder for the programs.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files of their names.")] = False,
) -> None:
    """Copy the example programs into a folder, to be read, run and changed."""
    from rlcore.cli.example_files import copy_examples

    for path in copy_examples(folder, force=force):
        print(path)


@ops.command("explain")
def ops_explain(
    op: Annotated[str, typer.Argument(help='Such as "linear_loss".')],
    device: DeviceName = None,
    dtype: Annotated[str, typer.Option(help="Of hidden states or logits.")] = "bfloat16",
    hidden_size: Annotated[int, typer.Option(min=1, help="Of hidden states, where the operator takes them.")] = 2048,
    vocab_size: Annotated[int, typer.Option(min=1)] = 151_936,
    option: Annotated[list[str] | None, typer.Option(help='Feature in use, such as "entropy"; repeat.')] = None,
    implementation: Annotated[str | None, typer.Option(help="Ask for this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which implementation of an operator would run, and why each other would not."""
    import_torch()
    from rlcore.cli.explanation import explain

    choice = explain(
        op,
        device=device,
        dtype=dtype,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        options=option or (),
        implementation=implementation,
    )
    refused = [{"implementation": name, "reason": reason} for name, reason in choice.refused]
    if as_json:
        by = {"plugin": choice.plugin or None, "outranks": choice.outranks}
        print_json({"op": op, "implementation": choice.implementation, **by, "refused": refused})
    else:
        before = f", before the built-in {', '.join(choice.outranks)}" if choice.outranks else ""
        by_whom = f", by plugin {choice.plugin!r}{before}" if choice.plugin else ""
        rows = [[choice.implementation, f"runs{by_whom}"], *([r["implementation"], r["reason"]] for r in refused)]
        print_table([op, ""], rows)


def _worker(process: RunningProcess) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "parent": process.parent,
        "device": process.device,
        "engines": process.engines,
        "resident_bytes": process.resident_bytes,
        "age_s": round(process.age_s, 1),
    }


def _worker_row(process: RunningProcess | ListedProcess) -> list[str]:
    memory, age = f"{process.resident_bytes / 2**20:.0f} MiB", str(timedelta(seconds=int(process.age_s)))
    return [str(process.pid), str(process.parent), process.device, ", ".join(process.engines), memory, age]
