"""The sockets at which processes answer those that open their memory: their names, and what ended processes left."""

from __future__ import annotations

import os
import re
import socket

from rlcore.process.runtime_folder import RuntimeFolder
from rlcore.process.status import start_time

_NAME = re.compile(r"ipc-(\d+)-(\d+)\.sock")


def own_socket_name() -> str:
    """Return the name of the socket of this process in the runtime folder."""
    return f"ipc-{os.getpid()}-{start_time(os.getpid())}.sock"


def remove_stale_sockets(folder: RuntimeFolder) -> None:
    """Remove the sockets of processes that have ended."""
    for name in folder.names("ipc-*-*.sock"):
        named = _NAME.fullmatch(name)
        if named is None:  # another program's file
            continue
        pid, started = named.groups()
        # A process of another PID namespace seems dead, but it answers.
        if str(start_time(int(pid))) != started and not _answers(folder.address(name)):
            folder.remove(name)


def _answers(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(address)
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True
