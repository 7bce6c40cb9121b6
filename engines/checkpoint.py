"""A training checkpoint: a folder whose manifest names the data files, so that a save is atomic.

    manifest.json                       names the files below and holds all plain state
    weights-<id>.safetensors            parameters and persistent buffers
    optimizer-<id>.safetensors          tensors of every optimizer
    rng-<id>.safetensors                states of the random generators

New data files are written and synced under new names, then the manifest is replaced by rename, then the old files go.
A kill or a full disk at any moment leaves the last complete checkpoint. No pickle anywhere.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from rlcore.atomic import write_file
from rlcore.errors import CheckpointError, InvalidInputError

SCHEMA = "rlcore.checkpoint/1"
_MANIFEST = "manifest.json"
_OWN = re.compile(r"(weights|optimizer|rng)-[0-9a-f]{12}\.safetensors")


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: str
    files: dict[str, str]
    """Group, such as "weights" -> file name."""
    state: dict[str, Any]
    """Plain values: step, version, optimizer hyper-parameters, schedulers, the user's own."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read: tensors by group and name, and plain state."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def write(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    """Make ``folder`` hold this checkpoint, or, on any failure, what it held before.

    Raises:
        InvalidInputError: ``state`` holds something JSON cannot.
        CheckpointError: it could not be written (disk full, no permission).
    """
    files = {group: f"{group}-{uuid.uuid4().hex[:12]}.safetensors" for group in tensors}
    manifest = _encode(Manifest(schema=SCHEMA, files=files, state=state))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for group, named in tensors.items():
            _write_tensors(folder / files[group], named)
        write_file(folder / _MANIFEST, manifest)
    except write_errors() as error:
        _remove(folder, list(files.values()))
        kept = f"the previous checkpoint in {folder} is intact" if (folder / _MANIFEST).exists() else "nothing is left"
        raise CheckpointError(f"cannot write the checkpoint {folder}: {error}; {kept}") from error
    _remove(
        folder,
        [file.name for file in folder.iterdir() if _OWN.fullmatch(file.name) and file.name not in files.values()],
    )


def read(folder: Path) -> Checkpoint:
    """The last complete checkpoint in ``folder``, tensors on the host.

    Raises:
        CheckpointError: none there, damaged, or written by another version of the format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
        if manifest.schema != SCHEMA:
            raise CheckpointError(f"{folder} has the format {manifest.schema!r}; this rlcore reads {SCHEMA!r}")
        tensors = {group: load_file(folder / name) for group, name in manifest.files.items()}
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


def _write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def write_errors() -> tuple[type[Exception], ...]:
    """What a full disk raises: safetensors has an error of its own."""
    from safetensors import SafetensorError

    return OSError, SafetensorError
