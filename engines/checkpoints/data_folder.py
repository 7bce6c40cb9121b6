"""The folder of a checkpoint's files. Nothing is removed from it but files that a save has written."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_MARKER = "rlcore-save"
"""A file that every folder of a save has before anything else, and until everything else has gone."""
_COMMITTED_BY = "commit"
_OWN = re.compile(rf"\.?[a-z]+-[0-9]+\.safetensors|{_COMMITTED_BY}")
_NAME = re.compile(r"data-[0-9a-f]{12}")


def make_data_folder(data: Path) -> None:
    """Make the folder, if no other worker has."""
    data.mkdir(parents=True, exist_ok=True)
    (data / _MARKER).touch()


def is_first_to_commit(data: Path) -> bool:
    """Return True to one worker only. Two that end together can both find that all files are there."""
    try:
        os.close(os.open(data / _COMMITTED_BY, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


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


def remove_others(data: Path, known: str) -> None:
    """Remove what earlier saves left beside this one; ``known`` is the name of the last."""
    for found in data.parent.iterdir():
        if _NAME.fullmatch(found.name) and found != data:
            remove_data_folder(found, is_known=found.name == known)
