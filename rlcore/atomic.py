"""Atomic replacement of files and folders: after a kill or a full disk at any moment, the earlier content is there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import stat
import tempfile
from pathlib import Path

from rlcore.file_lock import let_go, take

_CURRENT_FOLDER, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of renameat2(2)."""


def write_file(path: Path, data: bytes) -> None:
    """Replace the content of ``path``, or of the file that a link there points to; it is on disk when this returns.

    Raises:
        OSError: it could not be written, or is a device or a pipe; ``path`` is as it was.
    """
    path = resolved(path)
    if is_special(path):
        raise OSError(errno.EINVAL, "a device or a pipe is not replaced by a file", str(path))
    remove_unfinished(path)
    descriptor, temporary = _new_file(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
            os.chmod(temporary, 0o666 & ~_umask())  # as open() makes files; mkstemp's are for the owner alone
            os.replace(temporary, path)  # before the descriptor is closed, and with it the lock
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def append_to_file(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is made if it is not there; it is on disk when this returns.

    Raises:
        OSError: it could not be written (disk full); the file is as it was.
    """
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:  # a full disk takes a part, and fails at the rest
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # a device has no size
                file.truncate(size)
            raise


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders change places in one step; return False where that is not possible."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:  # a C library without it
        return False
    return not renameat2(_CURRENT_FOLDER, os.fsencode(one), _CURRENT_FOLDER, os.fsencode(other), _EXCHANGE)


def _new_file(path: Path) -> tuple[int, str]:
    """Make a file beside ``path`` and lock it; return its descriptor and name."""
    while True:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
        if take(descriptor) is not False and os.path.exists(temporary):
            return descriptor, temporary
        os.close(descriptor)  # before it was locked, another process took it for what a killed one has left


def remove_unfinished(path: Path) -> None:
    """Remove what killed calls of ``write_file(path, ...)`` have left, where locks show that nobody writes it."""
    path = resolved(path)
    for found in path.parent.glob(f"{glob.escape(_prefix(path))}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone
            descriptor = os.open(found, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if take(descriptor):
                    found.unlink()
            finally:
                let_go(descriptor)


def resolved(path: Path) -> Path:
    """Return the path that links lead to. Raises OSError where they go round in a circle."""
    try:
        return path.resolve()
    except RuntimeError as error:  # as Python before 3.13 says it
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _prefix(path: Path) -> str:
    """Return the start of the names that files have before they are whole; nobody else gives such names."""
    return f".{path.name}.rlcore-"


def is_special(path: Path) -> bool:
    """Return True for a device, a pipe or a socket, which ``os.replace`` would turn into a regular file."""
    try:
        mode = path.stat().st_mode  # one look: between two it may vanish, and is no device for that
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def sync_to_disk(path: Path) -> None:
    """Flush a file's content, or a folder, so that files made or renamed in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Return the umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
