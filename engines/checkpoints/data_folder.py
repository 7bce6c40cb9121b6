"""The folder of a checkpoint's files. Nothing is removed from it but files that a save has written.

As long as a save goes on, each of its workers holds a lock on the folder's marker. So another program that saves into
the same place can tell what a killed save has left from what a living one still writes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rlcore.engines.checkpoints.damage import DamageError
from rlcore.engines.checkpoints.manifest import read_manifest
from rlcore.errors import CheckpointError
from rlcore.file_lock import let_go, share, take

_MARKER = "rlcore-save"
"""A file that every folder of a save has before anything else, and until everything else has gone."""
_COMMITTED_BY = "commit"
_OWN = re.compile(rf"\.?[a-z]+-[0-9]+\.safetensors|{_COMMITTED_BY}")
_NAME = re.compile(r"data-[0-9a-f]{12}")


def hold_data_folder(data: Path) -> int:
    """Make the folder, if no other worker has, and hold it. Return a descriptor to ``let_go`` when the save is over."""
    while True:
        data.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed just now by who took it for a killed save's
            descriptor = os.open(data / _MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            share(descriptor)
            try:
                if os.path.samestat(os.fstat(descriptor), (data / _MARKER).stat()):
                    return descriptor
            except FileNotFoundError:
                pass
            let_go(descriptor)


def check_own(folder: Path) -> None:
    """Raise CheckpointError for the root of the file system and the home folder, which nobody means."""
    for never, what in (("/", "the root of the file system"), (os.path.expanduser("~"), "your home folder")):
        if folder.resolve() == Path(never).resolve():
            raise CheckpointError(
                f"{folder} is {what}: a checkpoint has a folder of its own, such as {folder / 'checkpoint'}"
            )


def is_made(data: Path) -> bool:
    """Return True once some worker has made the folder."""
    return (data / _MARKER).exists()


def is_first_to_commit(data: Path) -> bool:
    """Return True to one worker only. Two that end together can both find that all files are there."""
    try:
        os.close(os.open(data / _COMMITTED_BY, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def is_needed(data: Path) -> bool:
    """Return True if the manifest names the folder. One that cannot be read may name any that was to be committed."""
    try:
        return read_manifest(data.parent).data == data.name
    except FileNotFoundError:
        return False
    except (DamageError, CheckpointError):  # damaged, of a newer rlcore, or not to be had just now
        return (data / _COMMITTED_BY).exists()


def remove_data_folder(data: Path, *, is_known: bool = False) -> None:
    """Remove the files that a save wrote there, and the folder if nothing else is in it.

    Nothing is touched unless the folder has the marker of a save, or ``is_known`` to be one. What cannot be removed
    stays.
    """
    if data.is_symlink() or not (is_known or (data / _MARKER).exists()):
        with contextlib.suppress(OSError):  # the folder of a save that was killed before it made the marker
            data.rmdir()
        return
    with contextlib.suppress(OSError):
        for found in sorted(data.iterdir()):
            if _OWN.fullmatch(found.name):
                found.unlink()
        (data / _MARKER).unlink(missing_ok=True)
        data.rmdir()


def remove_others(data: Path, known: str = "", *, is_committed: bool) -> None:
    """Remove what earlier saves left beside this one, but not what a save still writes, nor the last checkpoint.

    Args:
        known: the name of the checkpoint before this one.
        is_committed: this save is the last checkpoint. Before that nothing is removed where the file system has no
            locks, so that it cannot be told who still writes.
    """
    for found in data.parent.iterdir() if data.parent.is_dir() else ():
        if _NAME.fullmatch(found.name) and found != data:
            with _marker_of(found) as marker:
                if marker is None and found.name != known:
                    with contextlib.suppress(OSError):  # not empty: its save has just made the marker
                        found.rmdir()
                    continue
                is_alone = True if marker is None else take(marker)
                is_free = is_alone is not False if is_committed else is_alone
                if is_free and not is_needed(found):
                    remove_data_folder(found, is_known=found.name == known)


@contextlib.contextmanager
def _marker_of(data: Path) -> Iterator[int | None]:
    """Yield a descriptor of the folder's marker, None if it cannot be opened; what was taken by it is let go."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(data / _MARKER, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            let_go(descriptor)
