"""Replace a folder by a new one in one step: after a kill at any moment it is the earlier one or the new one, whole."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlcore.atomic import exchange, sync_to_disk
from rlcore.file_lock import let_go, take

_MARKER = "rlcore-export"
"""A file in the folder in which a new one is written, which holds a lock on it. It is the first there and the last."""


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder`` to write into; at the end ``put_in_place`` may have moved it away."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, held = _new_temporary(folder)
    try:
        new = temporary / "new"
        new.mkdir()
        yield new
    finally:
        _remove(temporary)
        let_go(held)


def put_in_place(new: Path, folder: Path) -> None:
    """Put a folder of ``new_folder`` in the place of ``folder``, whose earlier content goes with the block's end.

    Where the file system cannot let two folders change places, a kill may leave nothing there until
    ``remove_unfinished`` brings the earlier folder back.
    """
    if not folder.exists():
        new.rename(folder)
    elif not exchange(new, folder):
        old = new.with_name("old")
        folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    sync_to_disk(folder.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed programs have left beside ``folder``; put back an earlier one that they had taken away."""
    for found in folder.parent.glob(f"{glob.escape(_prefix(folder))}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone
            try:
                held = os.open(found / _MARKER, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                found.rmdir()  # killed before it made the marker, or after it removed it
                continue
            try:
                if take(held):
                    if not folder.exists() and (found / "old").exists():
                        (found / "old").rename(folder)
                    _remove(found)
            finally:
                let_go(held)


def _prefix(folder: Path) -> str:
    """Return the start of the names of folders in which new ones for ``folder`` are written."""
    return f".{folder.name}.rlcore-"


def _new_temporary(folder: Path) -> tuple[Path, int]:
    """Make a folder beside ``folder`` and lock it; return it with the lock's descriptor."""
    while True:
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_prefix(folder)))
        marker = temporary / _MARKER
        with contextlib.suppress(FileNotFoundError):  # another process took it for what a killed one has left
            held = _marked(marker)
            if take(held) is not False and marker.exists():
                return temporary, held
            os.close(held)


def _marked(marker: Path) -> int:
    """Make the marker; return its descriptor. Where there is no room for it, its folder goes too."""
    try:
        return os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        with contextlib.suppress(OSError):
            marker.parent.rmdir()
        raise


def _remove(temporary: Path) -> None:
    """Remove a folder, its marker last: without it nobody could tell whose the rest is. What cannot go stays."""
    with contextlib.suppress(OSError):
        for found in temporary.iterdir():
            if found.name != _MARKER:
                shutil.rmtree(found)
        (temporary / _MARKER).unlink()
        temporary.rmdir()
