"""A training checkpoint: a folder whose manifest names the folder of the data, so that a save is atomic.

    manifest.json                                names the data and holds all plain state
    data-<id>/weights-<rank>.safetensors         parameters and persistent buffers
    data-<id>/optimizer-<rank>.safetensors       tensors of every optimizer
    data-<id>/rng-<rank>.safetensors             states of the random generators

Each worker writes its parts of the tensors, and reads those that it needs, by whatever number of workers they were
written. A new folder is filled and synced, then the manifest is replaced by rename, then the old folder goes. A kill or
a full disk at any moment leaves the last complete checkpoint. No pickle anywhere.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from rlcore.atomic import sync_folder, write_file
from rlcore.engines.checkpoints.saved_tensor import Part, SavedTensor, open_parts, write_parts
from rlcore.engines.checkpoints.tensor_file import host_pieces
from rlcore.errors import CheckpointError, InvalidInputError

SCHEMA = "rlcore.checkpoint/3"
_MANIFEST = "manifest.json"
_COMMITTED_BY = "commit"
_DATA = re.compile(r"data-[0-9a-f]{12}")


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: str
    data: str
    """Name of the folder that has the files."""
    groups: list[str]
    """Start of the files' names, such as "weights"."""
    num_parts: int
    """Files of each group."""
    state: dict[str, Any]
    """Plain values: step, version, optimizer hyper-parameters, schedulers, the user's own."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read: tensors by group and name, and plain state."""

    tensors: dict[str, dict[str, SavedTensor]]
    state: dict[str, Any]


class Save:
    """One worker's share of a save. It writes when it likes, in any thread: whoever is the last commits."""

    def __init__(
        self, folder: Path, name: str, *, rank: int, size: int, groups: Sequence[str], state: dict[str, Any]
    ) -> None:
        """The shares of all ``size`` workers have the same new ``name``, 12 hexadecimal digits, and the same state.

        Raises:
            InvalidInputError: ``state`` holds something JSON cannot.
        """
        self.folder = folder
        self.data = folder / f"data-{name}"
        self._rank, self._size = rank, size
        self._manifest = _encode(
            Manifest(schema=SCHEMA, data=self.data.name, groups=list(groups), num_parts=size, state=state)
        )
        self._groups = groups

    def write(
        self,
        parts: Mapping[str, Mapping[str, Part]],
        pieces: Callable[[Tensor], Iterable[Tensor]] = host_pieces,
    ) -> None:
        """Make this worker's files, and the checkpoint the folder's if all others are made.

        Args:
            parts: by group and name.
            pieces: see ``write_parts``.

        Raises:
            OSError: they could not be written.
        """
        self.data.mkdir(parents=True, exist_ok=True)
        for group, named in parts.items():
            write_parts(self._file(group, self._rank), named, pieces)
        if self._is_last():
            sync_folder(self.data)
            write_file(self.folder / _MANIFEST, self._manifest)
            self._remove_earlier()

    def discard(self) -> None:
        """After one of the workers failed: what all have written goes."""
        if committed(self.folder) != self.data.name:
            shutil.rmtree(self.data, ignore_errors=True)

    def _file(self, group: str, rank: int) -> Path:
        return self.data / f"{group}-{rank}.safetensors"

    def _is_last(self) -> bool:
        """True for one worker. Two can find all files there, if they end together."""
        if not all(self._file(group, rank).exists() for group in self._groups for rank in range(self._size)):
            return False
        try:
            os.close(os.open(self.data / _COMMITTED_BY, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _remove_earlier(self) -> None:
        for found in self.folder.iterdir():
            if _DATA.fullmatch(found.name) and found != self.data:
                shutil.rmtree(found, ignore_errors=True)


def committed(folder: Path) -> str:
    """Name of the data folder of the last complete checkpoint; "" if there is none that can be read."""
    try:
        return _manifest(folder).data
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, CheckpointError):
        return ""


def read(folder: Path) -> Checkpoint:
    """The last complete checkpoint in ``folder``; tensors stay in their files until they are read.

    Raises:
        CheckpointError: none there, damaged, or written by another version of the format.
    """
    from safetensors import SafetensorError

    try:
        while True:
            manifest = _manifest(folder)
            try:
                tensors = {
                    group: open_parts(
                        folder / manifest.data / f"{group}-{rank}.safetensors" for rank in range(manifest.num_parts)
                    )
                    for group in manifest.groups
                }
            except FileNotFoundError:
                if committed(folder) == manifest.data:
                    raise
                continue  # it has just been replaced
            return Checkpoint(tensors, manifest.state)
    except FileNotFoundError as error:
        raise CheckpointError(f"no complete checkpoint in {folder}: {error}") from error
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {error}") from error


def _manifest(folder: Path) -> Manifest:
    text = (folder / _MANIFEST).read_bytes()
    schema = msgspec.json.decode(text, type=dict[str, Any]).get("schema")
    if schema != SCHEMA:
        raise CheckpointError(f"{folder} has the format {schema!r}; this rlcore reads {SCHEMA!r}")
    return msgspec.json.decode(text, type=Manifest)


def _encode(manifest: Manifest) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(manifest))
    except TypeError as error:
        raise InvalidInputError(f"a checkpoint's state must be plain values that JSON can hold: {error}") from error
