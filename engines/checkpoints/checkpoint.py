"""A training checkpoint: a folder whose manifest names the folder of the data, so that a save is atomic.

    manifest.json                                names the data and holds all plain state
    data-<id>/weights-<rank>.safetensors         parameters and persistent buffers
    data-<id>/optimizer-<rank>.safetensors       tensors of every optimizer
    data-<id>/rng-<rank>.safetensors             states of the random generators

Each worker writes its parts of the tensors, and reads those that it needs, by whatever number of workers they were
written. A new folder is filled and synced, then the manifest is replaced by rename, then the old folder goes. A kill or
a full disk at any moment leaves the last complete checkpoint. No pickle anywhere.

Manifest and files hold digests of themselves and the id of their save: what was damaged, or belongs elsewhere, is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.atomic import sync_folder
from rlcore.engines.checkpoints.damage import DamageError
from rlcore.engines.checkpoints.data_folder import (
    is_first_to_commit,
    make_data_folder,
    remove_data_folder,
    remove_others,
)
from rlcore.engines.checkpoints.manifest import (
    Manifest,
    check_replaceable,
    committed,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from rlcore.engines.checkpoints.saved_tensor import Part, SavedTensor, open_parts, write_parts
from rlcore.engines.checkpoints.tensor_file import Stamp, TensorFile, host_pieces
from rlcore.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was opened: its tensors stay in their files until they are read."""

    folder: Path
    manifest: Manifest
    tensors: dict[str, dict[str, SavedTensor]]

    @property
    def state(self) -> dict[str, Any]:
        return self.manifest.state

    def check_data(self, rank: int = 0, size: int = 1) -> None:
        """Compare with their digests the data of the files that are this rank's to check, out of ``size`` ranks.

        Raises:
            CheckpointError: they differ, or cannot be read.
            FileNotFoundError: another save has replaced the checkpoint.
        """
        for files in self.manifest.files(self.folder).values():
            for file in files[rank::size]:
                try:
                    TensorFile(file).check_data()
                except DamageError as error:
                    raise damaged(self.folder, error) from error


class Save:
    """One worker's share of a save. It writes when it likes, in any thread: whoever is the last commits."""

    def __init__(
        self, folder: Path, stamp: Stamp, *, rank: int, size: int, groups: Sequence[str], state: dict[str, Any]
    ) -> None:
        """The shares of all ``size`` workers have the same new stamp, and the same state of plain values."""
        self.folder = folder
        self.data = folder / f"data-{stamp.save}"
        self._stamp, self._rank, self._size, self._groups = stamp, rank, size, groups
        self._manifest = encode_manifest(stamp, list(groups), size, state)

    def check_folder(self) -> None:
        """Raise CheckpointError if the folder holds something of somebody else's that a save would replace."""
        check_replaceable(self.folder)

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
            CheckpointError: see ``check_folder``.
        """
        self.check_folder()
        make_data_folder(self.data)
        for group, named in parts.items():
            write_parts(self._file(group, self._rank), named, self._stamp, pieces)
        if self._is_last():
            sync_folder(self.data)
            self.check_folder()
            previous = committed(self.folder)
            write_manifest(self.folder, self._manifest)
            remove_others(self.data, previous)

    def discard(self) -> None:
        """After one of the workers failed: what all have written goes."""
        if committed(self.folder) != self.data.name:
            remove_data_folder(self.data)

    def _file(self, group: str, rank: int) -> Path:
        return self.data / f"{group}-{rank}.safetensors"

    def _is_last(self) -> bool:
        files = (self._file(group, rank) for group in self._groups for rank in range(self._size))
        return all(file.exists() for file in files) and is_first_to_commit(self.data)


def read(folder: Path) -> Checkpoint:
    """Open the last complete checkpoint in ``folder``.

    Its manifest and the headers of its files are right, and the parts cover every tensor exactly once. Of the data
    nothing is read: ``check_data`` compares them.

    Raises:
        CheckpointError: none there, damaged, or written by another version of the format.
    """
    try:
        while True:
            manifest = read_manifest(folder)
            try:
                tensors = {group: open_parts(files, manifest.stamp) for group, files in manifest.files(folder).items()}
            except FileNotFoundError:
                if committed(folder) == manifest.data:
                    raise
                continue  # it has just been replaced
            return Checkpoint(folder, manifest, tensors)
    except FileNotFoundError as error:
        raise CheckpointError(f"no complete checkpoint in {folder}: {error}") from error
    except DamageError as error:
        raise damaged(folder, error) from error


def damaged(folder: Path, error: DamageError) -> CheckpointError:
    """Return what is said of a checkpoint with damage."""
    return CheckpointError(
        f"the checkpoint {folder} is damaged: {error}; use another checkpoint "
        f"(`rlcore checkpoint verify {folder}` checks every file)"
    )
