"""The listener of a gloo group: once all ranks are connected it has no use, so it takes no connection any more.

Gloo accepts whoever connects, keeps a connection until it says which rank it is, and ends the process by SIGABRT when
``accept`` fails. So any user of the host could use up a rank's descriptors. Gloo has no Unix sockets, takes no
listener from outside through torch, and never closes its own. Nobody else can close it either: gloo's thread would then
spin on the descriptor, or close it a second time. But the owner can attach a socket filter, socket(7), which drops
every request for a new connection, and keeps the connections that exist.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import time

from rlcore._torch_private import Store
from rlcore.errors import CollectiveTimeoutError
from rlcore.process.tcp_sockets import (
    LISTEN,
    SYN_SENT,
    SocketAddress,
    describe,
    foreign_connections,
    own_sockets,
    shut_down,
    tcp_sockets,
)

_log = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_POLL_S = 0.002
_DROP_REQUESTS = (
    *((0x30, 0, 0, 13), (0x54, 0, 0, 0x12)),  # of the TCP header, the flags SYN and ACK
    *((0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)),  # SYN alone: keep 0 bytes, otherwise all
)
"""A program of the classic BPF: (code, jump if true, jump if false, operand) of each instruction."""


class GlooListener:
    """The listener of this rank, in a group whose ranks are all on this host.

    Args:
        store: the one that the group was made with; ranks publish the addresses of their listeners there.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._rank = rank
        keys = [f"0/{rank}" for rank in range(world_size)]
        is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"  # connects when two ranks first have to talk
        self._addresses = [store.get(key) for key in keys] if not is_lazy and store.check(keys) else []

    def wait_until_connected(self, timeout_s: float) -> None:
        """Wait until no connection of this rank to another is still to be accepted.

        When all ranks have done so, nobody needs a listener any more. Gloo itself waits for a connection only when it
        is first used.

        Raises:
            CollectiveTimeoutError: the listener of another rank does not answer.
        """
        deadline = time.monotonic() + timeout_s
        while ranks := self._unanswered():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"rank(s) {', '.join(map(str, ranks))} did not accept a connection of rank {self._rank} within "
                    f"{timeout_s:g} s",
                    ranks=tuple(ranks),
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Take no connection any more, and end those that other users made meanwhile."""
        try:
            self._close()
        except OSError as error:  # such as a sandbox that takes no filter
            self._stays_open(error)

    def _close(self) -> None:
        published = self._addresses[self._rank] if self._addresses else b""
        own = own_sockets()
        listeners = [one for one in tcp_sockets() if one.state == LISTEN and one.inode in own]
        listeners = [one for one in listeners if _packed(one.local) in published]
        if not listeners:
            self._stays_open("gloo connects lazily, listens on IPv6, or /proc does not show its sockets")
        for one in listeners:
            _drop_requests(own[one.inode])
        if foreign := [one for one in foreign_connections() if _packed(one.local) in published]:
            shut_down(foreign)
            _log.warning(
                "%s were ended: it is gloo's, and rank %d expects its peers alone", describe(foreign), self._rank
            )

    def _unanswered(self) -> list[int]:
        try:
            own, sockets = own_sockets(), tcp_sockets() if self._addresses else []
        except OSError:
            self._addresses = []  # what is not known to be connected is not closed
            return []
        waiting = [_packed(one.remote) for one in sockets if one.state == SYN_SENT and one.inode in own]
        return [rank for rank, address in enumerate(self._addresses) if any(one in address for one in waiting)]

    def _stays_open(self, why: object) -> None:
        _log.info("gloo's listener of rank %d stays open: %s", self._rank, why)


def _packed(address: SocketAddress) -> bytes:
    """Return the ``sockaddr_in``, of which gloo publishes the bytes among others."""
    return struct.pack("=H", socket.AF_INET) + address.port.to_bytes(2, "big") + socket.inet_aton(address.host)


def _drop_requests(descriptor: int) -> None:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in _DROP_REQUESTS))
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        fields = struct.pack("@HP", len(_DROP_REQUESTS), ctypes.addressof(program))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fields)
