"""Replace a file whole: a kill or a full disk at any moment leaves what was there before."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Make ``path``, or what a link there points to, hold ``data``, on disk when this returns.

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
    """A device, a pipe or a socket, which a file would take the place of."""
    return path.exists() and not (path.is_file() or path.is_dir())


def sync_folder(folder: Path) -> None:
    """What was made or renamed in it is on disk only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """It can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
