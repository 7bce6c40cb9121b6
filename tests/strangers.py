"""A process, as root one of another user, that connects to a listener as often as it is told, and stays connected."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

ANOTHER_USER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

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
