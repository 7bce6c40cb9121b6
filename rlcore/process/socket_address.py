"""Addresses of Unix sockets in folders of any depth, though the kernel takes a path of at most 107 bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 107
"""The longest path, of unix(7), without the zero at its end."""


@contextlib.contextmanager
def socket_address(path: str | Path) -> Iterator[str]:
    """Yield an address that ``bind`` and ``connect`` take for the socket at ``path``, valid inside.

    A path that is too long is reached through a descriptor of its folder. Only its name has to be short.

    Raises:
        OSError: the folder of a long path cannot be opened.
    """
    if len(os.fsencode(path)) <= MOST_BYTES:
        yield os.fspath(path)
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
