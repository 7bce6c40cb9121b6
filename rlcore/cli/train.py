"""The command ``rlcore train``: a whole program of reinforcement learning from one file."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlcore.cli.console import given_path
from rlcore.errors import printable
from rlcore.torch_import import import_torch

_INTERRUPTED = 130


def train(
    config: Annotated[
        Path, typer.Argument(parser=given_path, metavar="CONFIG.yaml", help="What to train, as docs/train.md says.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help='Such as "rollout.max_staleness=2".')
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output folder; begin it if there is none.")
    ] = False,
) -> None:
    """Train a language model by reinforcement learning, from one file; asynchronously, or step by step.

    Ctrl-C ends the run after its step, with everything saved; a second one at once.
    """
    import_torch()
    from rlcore.configuration_file import read_configuration
    from rlcore.quickstart.interrupt import Interrupt, Interrupted
    from rlcore.training.config import TrainConfig
    from rlcore.training.program import TrainProgram
    from rlcore.training.run_folder import TrainFolder

    settings = read_configuration(config, overrides or [], TrainConfig)
    command = shlex.join(["rlcore", "train", str(config), *(overrides or []), "--resume"])
    with TrainFolder(settings, resume=resume) as folder:
        try:
            with Interrupt(_say_at_once) as interrupt:
                TrainProgram(settings, config.parent, folder, say).run(interrupt)
        except Interrupted:
            say(f"stopped; continue with: {command}")
            raise typer.Exit(_INTERRUPTED) from None
        except KeyboardInterrupt:
            if folder.has_checkpoint:
                say(f"stopped at once; continue after the last checkpoint with: {command}")
            else:
                say(f"stopped at once, before the first checkpoint; begin again with: {command}")
            raise
    print(folder.model)


def say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _say_at_once(line: str) -> None:
    """Say it in a signal handler, which may come amid a write to the same stream, closed to others then."""
    os.write(sys.stderr.fileno(), f"{line}\n".encode())
