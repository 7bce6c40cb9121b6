"""A process, as root one of another user, that connects to a listener as often as it is told, and stays connected.

And what a system may not give to whom the tests run as: to be told from other users, and filters of sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ANOTHER_USER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
told_from_others = pytest.mark.skipif(
    os.getuid() == int(Path("/proc/sys/kernel/overflowuid").read_text()),
    reason="this user's id stands for all that the kernel has no id for",
)


_SO_ATTACH_FILTER = 26


def _takes_filters() -> bool:
    """Return False where the kernel refuses, as some do to who is not root; groups form there, too."""
    accept_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFFFFFF))
    with socket.socket() as any_socket:
        try:
            any_socket.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(accept_all))
            )
        except OSError:
            return False
    return True


filters_sockets = pytest.mark.skipif(not _takes_filters(), reason="this system refuses this user a filter of a socket")

_PROGRAM = """
import os, resource, socket, sys
host, port, count, user = sys.argv[1], *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if user != os.getuid():  # not before: another user may not read this Python
    os.setuid(user)
connections = [socket.socket() for _ in range(count)]
for connection in connections:
    connection.setblocking(False)
    connection.connect_ex((host, port))
print("connected", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def connected(address: tuple[str, int], count: int, *, user: int = os.getuid()) -> Iterator[None]:
    """Inside, a process of ``user`` has ``count`` connections to ``address``, or has asked for them."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, (*address, count, user))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        yield
        process.stdin.close()
