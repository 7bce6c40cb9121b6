"""Copies the example programs from the package to a folder of the user."""

from __future__ import annotations

from pathlib import Path

from rlcore.atomic import write_file
from rlcore.errors import InvalidInputError

FOLDER = Path(__file__).parent.parent / "examples"


def copy_examples(folder: Path, *, force: bool = False) -> list[Path]:
    """Write every example into ``folder``, which is created if it is missing; return the paths.

    Args:
        force: replace existing files of the same names.

    Raises:
        InvalidInputError: a file of that name exists, or the folder is not writable; nothing is replaced.
    """
    programs = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".py", ".yaml"))
    copies = {source: folder / source.relative_to(FOLDER) for source in programs}
    there = [copy for copy in copies.values() if copy.exists()]
    if there and not force:
        raise InvalidInputError(f"{there[0]} exists; give another folder, or --force to replace the examples in it")
    try:
        for source, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_file(copy, source.read_bytes())
    except OSError as error:
        message = f"cannot write examples to {folder}: {error.strerror}; give a folder that can be written to"
        raise InvalidInputError(message) from error
    return list(copies.values())
