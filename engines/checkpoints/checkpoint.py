"""A training checkpoint: a folder whose manifest names the folder of the data, so that a save is atomic.

    manifest.json                                names the data and holds all plain state
    data-<id>/weights-<rank>.safetensors         parameters and persistent buffers
    data-<id>/optimizer-<rank>.safetensors       tensors of every optimizer
    data-<id>/rng-<rank>.safetensors             states of the random generators

Each worker writes its parts of the tensors. A worker reads the parts that it needs, however many workers wrote them. A
new folder is filled and synced, then the manifest is replaced by rename, then the old folder goes. A kill or
a full disk at any moment leaves the last complete checkpoint. No pickle anywhere.

Manifest and files hold digests of themselves and the id of their save. Damaged files and files of another save are
refused.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.atomic import sync_to_disk
from rlcore.engines.checkpoints.damage import DamageError
from rlcore.engines.checkpoints.data_folder import (
    check_own,
    hold_data_folder,
    is_first_to_commit,
    is_made,
    is_needed,
    remove_data_folder,
    remove_others,
)
from rlcore.engines.checkpoints.manifest import (
    CheckpointManifest,
    check_replaceable,
    committed,
    encode_manifest,
    read_manifest,
    remove_unfinished_manifests,
    write_manifest,
)
from rlcore.engines.checkpoints.saved_tensor import SavedTensor, TensorPart, open_parts, write_parts
from rlcore.engines.checkpoints.tensor_file import Stamp, TensorFile, host_pieces
from rlcore.errors import CheckpointError
from rlcore.file_lock import let_go

_SEEN_WITHIN_S = 5.0
"""File systems of a network may show a new folder to other hosts a little later."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to read. Its tensors stay in their files until they are read."""

    folder: Path
    manifest: CheckpointManifest
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
    """One worker's part of a save. Workers write at any time, in any thread; the last one commits.

    All workers enter ``held`` before any of them leaves it: in between no other save takes the files for left behind.
    """

    def __init__(
        self, folder: Path, stamp: Stamp, *, rank: int, size: int, groups: Sequence[str], state: dict[str, Any]
    ) -> None:
        """Prepare the part of worker ``rank``. All ``size`` workers give the same new stamp and the same state."""
        self.folder = folder
        self.data = folder / f"data-{stamp.save}"
        self._stamp, self._rank, self._size, self._groups = stamp, rank, size, groups
        self._manifest = encode_manifest(stamp, list(groups), size, state)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Remove what killed saves have left, make the folder of the data, and hold it inside; ``write`` there.

        Raises:
            OSError: it cannot be made.
            CheckpointError: ``folder`` holds what a save would replace and is not ours, or is no place for one.
        """
        check_replaceable(self.folder)
        if self._rank == 0:
            check_own(self.folder)
            remove_unfinished_manifests(self.folder)
            remove_others(self.data, is_committed=False)
        held = hold_data_folder(self.data)
        try:
            yield
        finally:
            let_go(held)

    def check_shared(self) -> None:
        """Wait until this worker sees the folder that the first one has made.

        Raises:
            CheckpointError: it does not: the two are on hosts that do not share ``folder``.
        """
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not is_made(self.data):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.folder} is not one folder for all ranks: host {socket.gethostname()} does not see what "
                    "rank 0 has made there; give a folder on a file system that all hosts share"
                )
            time.sleep(_POLL_S)

    def write(
        self,
        parts: Mapping[str, Mapping[str, TensorPart]],
        pieces: Callable[[Tensor], Iterable[Tensor]] = host_pieces,
    ) -> None:
        """Write this worker's files; if all others are there, make this the checkpoint of the folder.

        Args:
            parts: by group and name.
            pieces: see ``write_parts``.

        Raises:
            OSError: they could not be written.
            CheckpointError: see ``held``.
        """
        for group, named in parts.items():
            write_parts(self._file(group, self._rank), named, self._stamp, pieces)
        if self._is_last():
            sync_to_disk(self.data)
            check_replaceable(self.folder)
            previous = committed(self.folder)
            write_manifest(self.folder, self._manifest)
            remove_others(self.data, previous, is_committed=True)

    def discard(self) -> None:
        """Remove what all workers have written, after one of them failed."""
        if not is_needed(self.data):
            remove_data_folder(self.data)

    def _file(self, group: str, rank: int) -> Path:
        return self.data / f"{group}-{rank}.safetensors"

    def _is_last(self) -> bool:
        files = (self._file(group, rank) for group in self._groups for rank in range(self._size))
        return all(file.exists() for file in files) and is_first_to_commit(self.data)


def read(folder: Path) -> Checkpoint:
    """Open the last complete checkpoint in ``folder``.

    The manifest and the headers of the files are checked, and that the parts cover every tensor exactly once. The data
    are not read: ``check_data`` compares them with their digests.

    Raises:
        CheckpointError: there is none, it is damaged, or it was written by another version of the format.
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
    """Return the error of a damaged checkpoint."""
    return CheckpointError(
        f"the checkpoint {folder} is damaged: {error}; use another checkpoint "
        f"(`rlcore checkpoint verify {folder}` checks every file)"
    )
