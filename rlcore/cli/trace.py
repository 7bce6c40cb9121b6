"""The command ``rlcore trace``: runs a program, notes what each of its processes does, and says where the time went."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rlcore.cli.console import check_free, given_path
from rlcore.errors import InvalidInputError, printable
from rlcore.settings import TRACE_FILES


def trace(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROGRAM [ARGS]...", help="A Python file, or a command such as `rlcore quickstart`."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", parser=given_path, metavar="PATH", help="Folder of the trace; a new one unless given."
        ),
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Torch's profiler records one call of each method of each worker, too.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="A record of `rlcore bench run` of this machine, to compare with its limits.")
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run nothing: report on the trace in this folder again; several, or timelines, with --picture."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw who generated, trained and waited in the traces of --report, such as timeline.png."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --picture, if there is one.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="How much of each trace --picture draws.", show_default="all")
    ] = None,
) -> None:
    """Run a program and show where its time goes: one timeline over all of its workers, and why devices are idle.

    Options of rlcore come before PROGRAM. The exit code is the program's. A trace of a program that was killed is
    reported as any other.
    """
    if bool(report) == bool(command):
        raise typer.BadParameter("give a program to run, or --report with the folder of a trace", param_hint="PROGRAM")
    if (picture is not None and not report) or (picture is None and len(report or ()) > 1):
        raise typer.BadParameter(
            "it draws the traces of --report, of which there may be several", param_hint="--picture"
        )
    if picture is not None:
        from rlcore.trace.gantt import draw_gantt

        check_free("--picture", picture, force=force)
        draw_gantt(report or [], picture, seconds=seconds)
        print(picture)
        return
    if report:
        _show(report[0], record)
        return
    program = _resolved(command or [])
    folder = output or _new_folder((command or [""])[0])
    code = _run(program, folder.absolute(), records_kernels=kernels)
    if not any(folder.glob(TRACE_FILES)):
        told = (
            f"{(command or [''])[0]} ended with exit code {code} and noted nothing: it built no engine of rlcore and "
            "entered no rlcore.span()"
        )
        if not code:
            raise InvalidInputError(told)
        print(printable(f"rlcore: {told}"), file=sys.stderr)
        raise typer.Exit(code)
    _show(folder, record)
    raise typer.Exit(code)


def _show(folder: Path, record: Path | None) -> None:
    from rlcore.trace.report import make_report, text_of

    print(printable(text_of(make_report(folder, record), folder)))


def _new_folder(program: str) -> Path:
    return Path("traces", f"{Path(program).stem}-{time.strftime('%Y%m%d-%H%M%S')}")


def _resolved(command: list[str]) -> list[str]:
    """Return the command to run: a Python file and rlcore itself by this interpreter.

    Raises:
        InvalidInputError: there is no such program.
    """
    name, *arguments = command
    if name.endswith(".py") and Path(name).is_file():
        return [sys.executable, *command]
    if name == "rlcore":
        return [sys.executable, "-m", "rlcore", *arguments]
    if (found := shutil.which(name)) is None:
        raise InvalidInputError(
            f"the program to trace must be a Python file or a command, got {name!r}, which is neither"
        )
    return [found, *arguments]


def _run(command: list[str], folder: Path, *, records_kernels: bool) -> int:
    """Run the program with a trace in ``folder``; return its exit code.

    Raises:
        InvalidInputError: the folder holds a trace already, or files that a report would replace, or cannot be
            written; the program cannot be run.
    """
    from rlcore.trace.report import check_pages

    if folder.is_dir() and any(folder.glob(TRACE_FILES)):
        raise InvalidInputError(
            f"{folder} holds a trace already; give another --output, or --report {folder} to see it"
        )
    check_pages(folder)  # now: a long run would end without its report
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"the folder of the trace {folder} cannot be made: {error.strerror}") from error
    environment = os.environ | {"RLCORE_TRACE": str(folder)}
    environment |= {"RLCORE_TRACE_KERNELS": "1"} if records_kernels else {}
    try:
        started = subprocess.Popen(command, env=environment)
    except OSError as error:  # such as a script whose first line does not say what runs it
        for one in made:
            one.rmdir()
        raise InvalidInputError(
            f"{command[0]} cannot be run: {error.strerror}; trace a Python file, a program, or a script that begins "
            "with a line such as #!/bin/sh"
        ) from error
    with started as program, _leaving_signals_to(program):
        code = program.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _leaving_signals_to(program: subprocess.Popen[Any]) -> Iterator[None]:
    """Inside, a terminal's Ctrl-C ends the program alone, which has it too; SIGTERM is passed on to it."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    on_term = signal.signal(signal.SIGTERM, lambda number, _: program.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, on_term)
