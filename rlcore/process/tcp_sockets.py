"""The TCP sockets of this host over IPv4: which are this process's, and which user has the other end of a connection.

TCP has no SO_PEERCRED. Where both ends are on one host, the kernel lists both in /proc/net/tcp, each with its user.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ESTABLISHED, SYN_SENT, LISTEN = 1, 2, 10
"""States, as in /proc/net/tcp."""

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_EVERY_ADDRESS = "0.0.0.0"


class SocketAddress(NamedTuple):
    """An address as ``getsockname`` returns it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class TcpSocket(NamedTuple):
    """A socket of any process of this network namespace."""

    local: SocketAddress
    remote: SocketAddress
    state: int
    user: int
    inode: int


class ForeignConnection(NamedTuple):
    """A connection that another user made to a listener of this process."""

    descriptor: int
    local: SocketAddress
    remote: SocketAddress
    user: int


def tcp_sockets() -> list[TcpSocket]:
    """Return the sockets of all users of this network namespace."""
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = map(_address, fields[1:3])
        found.append(TcpSocket(local, remote, int(fields[3], 16), int(fields[7]), int(fields[9])))
    return found


def own_sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets by their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or closed meanwhile
            if named := _SOCKET.fullmatch(os.readlink(f"/proc/self/fd/{name}")):
                found[int(named[1])] = int(name)
    return found


def foreign_connections() -> list[ForeignConnection]:
    """Return the connections of other users of this host to listeners of this process.

    A user whom this user namespace has no number for, such as one of another container, is not told from this one.
    """
    own, sockets = own_sockets(), tcp_sockets()
    listening = {one.local for one in sockets if one.state == LISTEN and one.inode in own}
    users = {(one.local, one.remote): one.user for one in sockets if one.state == ESTABLISHED}
    known = {os.getuid(), int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return [
        ForeignConnection(own[one.inode], one.local, one.remote, user)
        for one in sockets
        if one.state == ESTABLISHED and one.inode in own
        if not listening.isdisjoint({one.local, SocketAddress(_EVERY_ADDRESS, one.local.port)})
        if (user := users.get((one.remote, one.local))) is not None and user not in known
    ]


def shut_down(connections: Sequence[ForeignConnection]) -> None:
    """End connections; who accepted them reads their end, and closes them."""
    for connection in connections:
        with contextlib.suppress(OSError):  # closed meanwhile
            descriptor = os.dup(connection.descriptor)  # the number may come to mean another socket, the copy not
            with socket.socket(fileno=descriptor) as copy:
                if copy.getpeername() == connection.remote:
                    copy.shutdown(socket.SHUT_RDWR)


def describe(connections: Sequence[ForeignConnection]) -> str:
    """Return how many connections whose users made to which listeners."""
    listeners = ", ".join(sorted({str(one.local) for one in connections}))
    users = ", ".join(map(str, sorted({one.user for one in connections})))
    return f"{len(connections)} connection(s) of other users (user id {users}) to this process's listener {listeners}"


def _address(text: str) -> SocketAddress:
    """Read ``0100007F:AC0F``: the address as a number of this machine's byte order, and the port."""
    host, port = text.split(":")
    return SocketAddress(socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)), int(port, 16))
