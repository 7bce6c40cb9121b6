"""Undo a move that failed, and say in the error where everything is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rlcore.errors import DeviceError


@contextlib.contextmanager
def undone_by(undo: Callable[[], str]) -> Iterator[None]:
    """Call ``undo()`` after an error in the block; it takes the move back and returns words that say where all is.

    Raises:
        DeviceError: the error of the block with these words at its end. Any other error has them in a note.
    """
    try:
        yield
    except BaseException as error:
        where = undo()
        if isinstance(error, DeviceError):
            raise DeviceError(f"{error}. {where}") from error
        error.add_note(where)
        raise
