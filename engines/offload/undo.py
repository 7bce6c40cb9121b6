"""After an error everything is where it was, or the error says what is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rlcore.errors import DeviceError


@contextlib.contextmanager
def undone_by(undo: Callable[[], str]) -> Iterator[None]:
    """After an error in the block ``undo()`` takes it back and says where everything is.

    Raises:
        DeviceError: that of the block, with these words at its end. Any other error has them in a note.
    """
    try:
        yield
    except BaseException as error:
        where = undo()
        if isinstance(error, DeviceError):
            raise DeviceError(f"{error}. {where}") from error
        error.add_note(where)
        raise
