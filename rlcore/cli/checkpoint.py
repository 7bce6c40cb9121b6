"""The commands ``rlcore checkpoint``: look at folders that ``TrainEngine.save`` and ``export`` wrote."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore.cli.console import PLAIN, AsJson, given_path, print_json, print_table
from rlcore.errors import CheckpointError
from rlcore.torch_import import import_torch

if TYPE_CHECKING:
    from rlcore.engines.checkpoints.verify import FileReport, VerifyReport

checkpoint = typer.Typer(help="Look at checkpoints and exported models.", **PLAIN)


@checkpoint.callback()
def _commands() -> None:
    """Make ``checkpoint`` a group of commands, although it has only one."""


@checkpoint.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(parser=given_path, help="Of TrainEngine.save() or export().", metavar="FOLDER")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare every file of a checkpoint or an exported model with its digests, and print what is in it.

    Needs no engine and no device, and changes nothing. Exit code 1 where something is damaged, which is named.
    """
    import_torch()
    from rlcore.engines.checkpoints.verify import verify as verify_folder

    report = verify_folder(folder)
    if as_json:
        print_json(asdict(report) | {"is_whole": report.is_whole})
    else:
        _print(report)
    if not report.is_whole:
        damage = [*(file.file for file in report.files if file.error), *report.errors]
        raise CheckpointError(f"{folder} is damaged: {', '.join(damage)}")


def _print(report: VerifyReport) -> None:
    about = [
        ["format", report.format],
        ["save", report.save],
        ["digests", report.digest or "none: damage inside tensors is not seen; save it again with this rlcore"],
        *([name, str(value)] for name, value in _contents(report.state).items()),
    ]
    print_table(["folder", report.folder], about)
    print_table(["", "tensors", "bytes", "file", "damage"], [_row(file) for file in report.files])


def _contents(state: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of a checkpoint that are worth a line: of optimizers and schedulers the names."""
    found = {"written by": state.get("random_states_of")}
    for kind in ("optimizers", "schedulers"):
        held = state.get(kind)
        found[kind] = list(held) if isinstance(held, dict) else held
    return {name: value for name, value in (found | {"extra": state.get("extra")}).items() if value}


def _row(file: FileReport) -> list[str]:
    tensors = str(file.tensors) if file.file.endswith(".safetensors") else ""
    return ["FAIL" if file.error else "OK", tensors, str(file.bytes), file.file, file.error]
