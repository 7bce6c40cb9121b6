"""Write a model folder whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from rlcore.errors import CheckpointError
from rlcore.nn import safetensors_library


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make ``folder`` what ``write`` writes; a model folder that is there is replaced once the new one is whole.

    Raises:
        CheckpointError: the folder holds something else than a model, or could not be written.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} is not empty and holds no model (no config.json); export to another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            new, old = Path(temporary, "new"), Path(temporary, "old")
            new.mkdir()
            write(new)
            _swap(new, folder, old)
    except (OSError, safetensors_library().SafetensorError) as error:  # the latter of a full disk, too
        raise CheckpointError(f"cannot write the model to {folder}: {error}") from error


def _swap(new: Path, folder: Path, old: Path) -> None:
    """Put ``new`` in the place of ``folder``, which moves to ``old``, or back if that fails."""
    had_one = folder.exists()
    if had_one:
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if had_one:
            old.rename(folder)
        raise
