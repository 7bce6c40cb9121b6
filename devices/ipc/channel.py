"""One end of the socket between an exporter and an importer. A peer that does not read blocks nobody else."""

from __future__ import annotations

import collections
import os
import select
import socket
import struct
import threading

from rlcore.devices.ipc.messages import Message, PeerCredentials, encode, peer_of, receive

_INT = struct.Struct("i")
_LOOK_AGAIN_MS = 1000  # then check if this end was closed


class IpcChannel:
    """A channel whose ``send`` never waits: a thread sends what does not fit into the socket now."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[bytes, int | None]] = collections.deque()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def peer(self) -> PeerCredentials:
        return peer_of(self._connection)

    @property
    def num_descriptors_waiting(self) -> int:
        with self._lock:
            return sum(descriptor is not None for _, descriptor in self._waiting)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send a message now, or when the other end has made room. The caller keeps its descriptor.

        Raises:
            OSError: the other end is gone.
        """
        data = encode(message)
        with self._lock:
            if not self._waiting and self._is_taken(data, descriptor):
                return
            self._waiting.append((data, None if descriptor is None else os.dup(descriptor)))
            if len(self._waiting) == 1:
                threading.Thread(target=self._send_the_rest, name="rlcore-ipc-sender", daemon=True).start()

    def receive(self) -> tuple[Message, int | None] | None:
        """Return the next message and its descriptor, as ``messages.receive``."""
        return receive(self._connection)

    def close(self) -> None:
        with self._lock:
            self.close_unlocked()

    def close_unlocked(self) -> None:
        """Close without the lock, for a forked child, in which the thread that holds it may be missing."""
        self._connection.close()
        self._forget()

    def _forget(self) -> None:
        while self._waiting:
            _close(self._waiting.popleft()[1])

    def _is_taken(self, data: bytes, descriptor: int | None) -> bool:
        beside = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(descriptor))]
        try:  # socket.send_fds takes flags and does not use them
            self._connection.sendmsg([data], beside, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True

    def _send_the_rest(self) -> None:
        while True:
            self._wait_for_room()
            with self._lock:
                try:
                    while self._waiting and self._is_taken(*self._waiting[0]):
                        _close(self._waiting.popleft()[1])
                except OSError:  # the other end is gone, or this one was closed, which the reading thread notices
                    self._forget()
                if not self._waiting:
                    return

    def _wait_for_room(self) -> None:
        poll = select.poll()
        with self._lock:
            if self.fileno() < 0:
                return
            poll.register(self._connection, select.POLLOUT)
        poll.poll(_LOOK_AGAIN_MS)


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
