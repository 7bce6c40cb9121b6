"""The example programs, which are in the package, given to the user as files of his own."""

from __future__ import annotations

from pathlib import Path

from rlcore.atomic import write_file
from rlcore.errors import InvalidInputError

FOLDER = Path(__file__).parent.parent / "examples"


def copy_examples(folder: Path, *, force: bool = False) -> list[Path]:
    """Write every example into ``folder``, which is made if it is not there; return the files.

    Args:
        force: replace files of their names.

    Raises:
        InvalidInputError: a file is there, or none can be written; nothing is replaced.
    """
    copies = {source: folder / source.name for source in sorted(FOLDER.glob("*.py"))}
    there = [copy for copy in copies.values() if copy.exists()]
    if there and not force:
        raise InvalidInputError(f"{there[0]} exists; give another folder, or --force to replace the examples in it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, copy in copies.items():
            write_file(copy, source.read_bytes())
    except OSError as error:
        told = f"cannot write examples to {folder}: {error.strerror}; give a folder that can be written to"
        raise InvalidInputError(told) from error
    return list(copies.values())
