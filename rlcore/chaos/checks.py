"""The promises that are checked after every step; ``ViolationError`` says which was not kept."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.checkpoints.verify import verify
from rlcore.errors import CheckpointError, RlcoreError
from rlcore.process.status import maker_of_shared_memory

Weights = Mapping[str, Tensor]

_OF_A_CHECKPOINT = re.compile(r"manifest\.json|data-[0-9a-f]{12}(/(rlcore-save|commit|[a-z]+-[0-9]+\.safetensors))?")


class ViolationError(Exception):
    """A promise was not kept."""


def require(is_kept: object, promise: str) -> None:
    if not is_kept:
        raise ViolationError(promise)


def error_text(error: BaseException) -> str:
    """Return what a user reads of an error without looking for its causes: its text and notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def same(found: Weights, expected: Weights) -> bool:
    """Return True if weights are equal bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def check_error(error: BaseException, accepted: tuple[type[BaseException], ...]) -> None:
    """Check that an error is one of rlcore's, of the accepted types, and has a text."""
    kinds = " or ".join(kind.__name__ for kind in accepted) or "no error"
    require(isinstance(error, RlcoreError), f"{kinds} was promised, and {type(error).__name__} came: {error}")
    require(isinstance(error, accepted), f"{kinds} was promised, and {type(error).__name__} came: {error_text(error)}")
    require(str(error).strip(), f"{type(error).__name__} has no text")


def check_checkpoint(folder: Path, saves: Iterable[int]) -> None:
    """Check that the folder has one whole checkpoint, of ``saves``, and nothing else; nothing where there are none."""
    possible = sorted(saves)
    if not possible:
        return
    try:
        report = verify(folder)
    except CheckpointError as error:
        raise ViolationError(f"save {possible} had ended, and the folder has no whole checkpoint: {error}") from error
    damage = [f"{file.file}: {file.error}" for file in report.files if file.error] + report.errors
    require(report.is_whole, f"the last checkpoint is damaged: {'; '.join(damage)}")
    number = (report.state.get("extra") or {}).get("number")
    require(number in possible, f"the folder has save {number}, where one of {possible} was the last that had ended")


def strays(folder: Path) -> list[str]:
    """Return the files in a checkpoint's folder that no complete checkpoint has."""
    if not folder.exists():
        return []
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))]
    data = [name for name in names if name.startswith("data-") and "/" not in name]
    return [name for name in names if not _OF_A_CHECKPOINT.fullmatch(name)] + data[1:]


def left_of(scratch: Path, makers: Iterable[int], besides: int = 0) -> list[str]:
    """Return what programs have left of their processes, files and shared memory.

    Args:
        scratch: the folder of the round, which their environment names.
        makers: processes whose shared memory is looked for.
        besides: a process that still runs, and whose sockets may be there.
    """
    makers = set(makers)
    files = [path for folder in ("runtime", "tmp") for path in sorted((scratch / folder).glob("*"))]
    own = f"ipc-{besides}-"
    return [
        *(f"process {pid}: {command}" for pid, command in processes_of(scratch).items() if pid != besides),
        *(str(path.relative_to(scratch)) for path in files if not path.name.startswith(own)),
        *(f"/dev/shm/{name}" for name in sorted(os.listdir("/dev/shm")) if maker_of_shared_memory(name) in makers),
    ]


def processes_of(scratch: Path) -> dict[int, str]:
    """Return the running processes that have the folder in their environment, with their commands."""
    found: dict[int, str] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            try:
                if os.fsencode(scratch) in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(path.name)] = command[-100:]
            except OSError:  # it has ended, or is another user's
                continue
    return found


def check_log_probs(of_sampler: Tensor, of_trainer: Tensor, mask: Tensor, limit: float, promise: str) -> None:
    """Check that sampler and trainer have the same weights: they give the same log-probs."""
    worst: Any = (of_sampler - of_trainer).abs()[mask].max().item()
    require(worst <= limit, f"{promise}: its log-probs differ from the trainer's by {worst:.3g}, more than {limit:g}")
