"""Locks by which a process shows that it still works on files: the kernel frees them, however the process ends.

They are advisory (flock(2)). A file system may have none, as some network file systems are mounted; then nobody can
tell whether files are still in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path


def share(descriptor: int) -> None:
    """Hold a file together with others; wait while somebody has taken it."""
    with contextlib.suppress(OSError):  # no locks here
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def take(descriptor: int) -> bool | None:
    """Hold a file or a folder alone, if nobody else holds it. The descriptor of a file must be open for writing.

    Returns:
        True; or False if somebody holds it; or None if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def take_folder(folder: Path) -> int:
    """Hold a folder alone, and return the descriptor that does: until it is closed, or the process has ended.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    if take(descriptor) is False:
        os.close(descriptor)
        raise BlockingIOError(errno.EWOULDBLOCK, "another process holds it", str(folder))
    return descriptor


def let_go(descriptor: int) -> None:
    """Free the lock and close the descriptor, though a fork of this process may have a copy of it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
