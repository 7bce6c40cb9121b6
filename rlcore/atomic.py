"""Atomic replacement of a file: after a kill or a full disk at any moment, the earlier content is still there."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Replace the content of ``path``, or of the file that a link there points to; it is on disk when this returns.

    Raises:
        OSError: it could not be written, or is a device or a pipe; ``path`` is as it was.
    """
    path = path.resolve()
    if is_special(path):
        raise OSError(errno.EINVAL, "a device or a pipe is not replaced by a file", str(path))
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.chmod(temporary, 0o666 & ~_umask())  # as open() makes files; mkstemp's are for the owner alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def is_special(path: Path) -> bool:
    """Return True for a device, a pipe or a socket, which ``os.replace`` would turn into a regular file."""
    return path.exists() and not (path.is_file() or path.is_dir())


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that the files made or renamed in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Return the umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
