"""A training checkpoint: a folder whose manifest names the data files, so that a save is atomic.

    manifest.json                            names the files below and holds all plain state
    weights-<id>-<rank>.safetensors          parameters and persistent buffers
    optimizer-<id>-<rank>.safetensors        tensors of every optimizer
    rng-<id>-<rank>.safetensors              states of the random generators

Each worker writes its parts of the tensors, and reads those that it needs, by whatever number of workers they were
written. New data files are written and synced under new names, then the manifest is replaced by rename, then the old
files go. A kill or a full disk at any moment leaves the last complete checkpoint. No pickle anywhere.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.atomic import write_file
from rlcore.engines.saved_tensor import SavedTensor, open_parts, write_parts
from rlcore.errors import CheckpointError, InvalidInputError

SCHEMA = "rlcore.checkpoint/2"
_CPU = torch.device("cpu")
_MANIFEST = "manifest.json"
_OWN = re.compile(r"(weights|optimizer|rng)-[0-9a-f]{12}-\d+\.safetensors")


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: str
    files: dict[str, list[str]]
    """Group, such as "weights" -> file names."""
    state: dict[str, Any]
    """Plain values: step, version, optimizer hyper-parameters, schedulers, the user's own."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read: tensors by group and name, and plain state."""

    tensors: dict[str, dict[str, SavedTensor]]
    state: dict[str, Any]


def write(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any], device: torch.device = _CPU
) -> None:
    """Make ``folder`` hold this checkpoint, or, on any failure, what it held before. All workers call it together.

    Args:
        device: where the default group's tensors are.

    Raises:
        InvalidInputError: ``state`` holds something JSON cannot.
        CheckpointError: it could not be written (disk full, no permission), by this worker or another.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    name = _agreed_name(device)
    files = {group: [f"{group}-{name}-{one}.safetensors" for one in range(size)] for group in tensors}
    manifest = _encode(Manifest(schema=SCHEMA, files=files, state=state))
    own = {group: folder / names[rank] for group, names in files.items()}
    with _all_or_none(folder, device, lambda: _remove(own.values())):
        folder.mkdir(parents=True, exist_ok=True)
        for group, named in tensors.items():
            write_parts(own[group], named)
    with _all_or_none(folder, device, lambda: _remove(own.values())):
        if rank == 0:
            write_file(folder / _MANIFEST, manifest)
    if rank == 0:
        current = {name for names in files.values() for name in names}
        _remove(file for file in folder.iterdir() if _OWN.fullmatch(file.name) and file.name not in current)


@contextmanager
def _all_or_none(folder: Path, device: torch.device, undo: Callable[[], None]) -> Iterator[None]:
    """Where one worker fails to write, all raise."""
    failure: Exception | None = None
    try:
        yield
    except write_errors() as error:
        failure = error
    num_failed = torch.tensor(0 if failure is None else 1)
    if dist.is_initialized():
        num_failed = num_failed.to(device)
        dist.all_reduce(num_failed)
    if num_failed:
        undo()
        kept = f"the previous checkpoint in {folder} is intact" if (folder / _MANIFEST).exists() else "nothing is left"
        cause = "another worker failed" if failure is None else failure
        raise CheckpointError(f"cannot write the checkpoint {folder}: {cause}; {kept}") from failure


def read(folder: Path) -> Checkpoint:
    """The last complete checkpoint in ``folder``; tensors stay in their files until they are read.

    Raises:
        CheckpointError: none there, damaged, or written by another version of the format.
    """
    from safetensors import SafetensorError

    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
        if manifest.schema != SCHEMA:
            raise CheckpointError(f"{folder} has the format {manifest.schema!r}; this rlcore reads {SCHEMA!r}")
        tensors = {group: open_parts([folder / name for name in names]) for group, names in manifest.files.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"no complete checkpoint in {folder}: {error}") from error
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {error}") from error
    return Checkpoint(tensors, manifest.state)


def _encode(manifest: Manifest) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(manifest))
    except TypeError as error:
        raise InvalidInputError(f"a checkpoint's state must be plain values that JSON can hold: {error}") from error


def _agreed_name(device: torch.device) -> str:
    """New, and the same on all ranks."""
    chosen = torch.tensor(uuid.uuid4().int >> 80)
    if dist.is_initialized():
        chosen = chosen.to(device)
        dist.broadcast(chosen, src=0)
    return f"{int(chosen):012x}"


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def write_errors() -> tuple[type[Exception], ...]:
    """What a full disk raises: safetensors has an error of its own."""
    from safetensors import SafetensorError

    return OSError, SafetensorError
