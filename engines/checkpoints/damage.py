"""The error of a file that is not what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.atomic import is_special
from rlcore.errors import printable
from rlcore.nn import safetensors_library


class DamageError(Exception):
    """A file is not what was written. The caller, who knows the checkpoint, raises a CheckpointError that names it."""

    def __init__(self, path: Path, why: object) -> None:
        self.path = path
        self.why = printable(str(why))
        super().__init__(f"{path}: {self.why}")


@contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Raise what readers say of damaged files as DamageError; a file that is not there stays a FileNotFoundError."""
    try:
        if is_special(path):  # who opens a pipe waits for a writer
            raise OSError("it is a device or a pipe")
        yield
    except FileNotFoundError:
        raise
    except RecursionError as error:
        raise DamageError(path, "it is nested too deeply") from error
    except RuntimeError as error:
        if path.exists():
            raise
        raise FileNotFoundError(path) from error  # safetensors opens a file twice, and torch says so of the second time
    except (OSError, ValueError, safetensors_library().SafetensorError) as error:  # msgspec raises ValueErrors
        raise DamageError(path, error) from error
