"""The importing side of IPC: a connection to each exporter, and what of it this process has open.

An export is opened once by a process on each device, and counted; the last mapping that closes gives it back.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlcore.devices.ipc_exporter import refusal
from rlcore.devices.ipc_mapping import Mapping
from rlcore.devices.ipc_messages import Claim, Granted, Message, Refused, Release, Revoke, peer_of, receive, send
from rlcore.devices.ipc_socket import connect, ended, silent
from rlcore.errors import DeviceError, StateError

_RELEASE_TIMEOUT_S = 10.0  # only a stopped exporter does not read at once

Open = Callable[[int | None], torch.UntypedStorage]
"""Takes the descriptor that came with the grant."""


class _Connection:
    """To one exporter. A thread hears what the exporter says."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.claiming = threading.Lock()
        """Held by the one thread that asks for something."""
        self.is_lost = False
        self._lock = threading.Lock()
        self._awaited = 0
        self._answers: queue.SimpleQueue[tuple[Granted | Refused | None, int | None]] = queue.SimpleQueue()
        self._mappings: dict[str, list[Mapping]] = {}
        self._revoked: set[str] = set()
        self._socket = connect(path, timeout_s)
        self.pid = peer_of(self._socket).pid
        threading.Thread(target=self._listen, name=f"rlcore-ipc-importer-{self.pid}", daemon=True).start()

    def claim(self, claim: Claim, timeout_s: float) -> int | None:
        """Ask for an export; its descriptor, if it has one, is the caller's."""
        deadline = time.monotonic() + timeout_s
        self._awaited = claim.request
        try:
            send(self._socket, claim, deadline=deadline)
            answer, descriptor = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except (queue.Empty, TimeoutError) as error:
            raise DeviceError(silent(self.pid, timeout_s)) from error
        except OSError as error:
            raise DeviceError(ended(self.pid)) from error
        finally:
            self._give_up()
        if answer is None:
            raise DeviceError(ended(self.pid))
        if isinstance(answer, Refused):
            raise StateError(refusal(claim.export_id, self.pid, answer.reason))
        return descriptor

    def release(self, export_id: str) -> None:
        with contextlib.suppress(OSError):  # an exporter that has ended needs no word
            send(self._socket, Release(export_id), deadline=time.monotonic() + _RELEASE_TIMEOUT_S)

    def add(self, mapping: Mapping) -> None:
        """Pass revocations on to it; one may have come already."""
        export_id = mapping.handle.export_id
        with self._lock:
            self._mappings.setdefault(export_id, []).append(mapping)
            is_revoked = self.is_lost or export_id in self._revoked
        if is_revoked:
            mapping.revoke()

    def remove(self, mapping: Mapping) -> None:
        export_id = mapping.handle.export_id
        with self._lock:
            self._mappings[export_id].remove(mapping)
            if not self._mappings[export_id]:
                del self._mappings[export_id]
                self._revoked.discard(export_id)

    def close_socket(self) -> None:
        self._socket.close()

    def _listen(self) -> None:
        while (received := self._receive()) is not None:
            message, descriptor = received
            match message:
                case Revoke():
                    self._revoke(message.export_id)
                case Granted() | Refused():
                    self._answer(message, descriptor)
        self._lose()

    def _answer(self, answer: Granted | Refused, descriptor: int | None) -> None:
        with self._lock:
            if answer.request == self._awaited:
                self._answers.put((answer, descriptor))
                return
        self._decline(answer, descriptor)  # it came after its deadline

    def _give_up(self) -> None:
        """Nobody waits any more; an answer that came at the last moment is declined too."""
        with self._lock:
            self._awaited = 0
        while not self._answers.empty():
            answer, descriptor = self._answers.get()
            if answer is not None:
                self._decline(answer, descriptor)

    def _decline(self, answer: Granted | Refused, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(answer, Granted):
            self.release(answer.export_id)

    def _receive(self) -> tuple[Message, int | None] | None:
        try:
            return receive(self._socket)
        except DeviceError:  # whoever answers there is no exporter
            return None

    def _revoke(self, export_id: str) -> None:
        with self._lock:
            self._revoked.add(export_id)
            mappings = list(self._mappings.get(export_id, []))
        for mapping in mappings:
            mapping.revoke()

    def _lose(self) -> None:
        with self._lock:
            self.is_lost = True
            mappings = [
                mapping for mappings in self._mappings.values() for mapping in mappings if not mapping.is_revoked
            ]
        self._answers.put((None, None))
        self.close_socket()
        for mapping in mappings:
            mapping.revoke()


@dataclass(slots=True)
class _Opened:
    storage: torch.UntypedStorage
    count: int = 1


class Importer:
    """What this process has open of others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}
        self._opened: dict[tuple[str, str], _Opened] = {}

    def open(
        self,
        path: str,
        claim: Claim,
        device_name: str,
        *,
        open_storage: Open,
        close_storage: Callable[[], None],
        make: Callable[[torch.UntypedStorage, Callable[[Mapping], None]], Mapping],
        timeout_s: float,
    ) -> Mapping:
        """Ask the exporter at ``path``, open what it grants unless this process has, and make a mapping of it."""
        connection = self._connection(path, timeout_s)
        key = (device_name, claim.export_id)
        with connection.claiming:
            storage = self._reuse(key)
            if storage is None:
                storage = _open(connection, claim, open_storage, timeout_s)
                with self._lock:
                    self._opened[key] = _Opened(storage)

        def release(mapping: Mapping) -> None:
            connection.remove(mapping)
            if self._drop(key):
                close_storage()
                connection.release(claim.export_id)

        mapping = make(storage, release)
        connection.add(mapping)
        return mapping

    def _connection(self, path: str, timeout_s: float) -> _Connection:
        with self._lock:
            known = self._connections.get(path)
            if known is None or known.is_lost:
                known = self._connections[path] = _Connection(path, timeout_s)
            return known

    def _reuse(self, key: tuple[str, str]) -> torch.UntypedStorage | None:
        with self._lock:
            opened = self._opened.get(key)
            if opened is None:
                return None
            opened.count += 1
            return opened.storage

    def _drop(self, key: tuple[str, str]) -> bool:
        """True when that was the last use."""
        with self._lock:
            opened = self._opened[key]
            opened.count -= 1
            if opened.count == 0:
                del self._opened[key]
            return opened.count == 0

    def close_sockets(self) -> None:
        """In a forked child: what it inherited would hide from exporters that the importer has ended."""
        for connection in self._connections.values():
            connection.close_socket()


def _open(connection: _Connection, claim: Claim, open_storage: Open, timeout_s: float) -> torch.UntypedStorage:
    descriptor = connection.claim(claim, timeout_s)
    try:
        return open_storage(descriptor)
    except BaseException:
        connection.release(claim.export_id)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


_abandoned: list[Importer] = []
_importer = Importer()


def importer() -> Importer:
    """The one of this process."""
    return _importer


def _begin_anew() -> None:
    """A forked child has nothing open. It keeps what its parent has, unused: it cannot close device memory."""
    global _importer  # noqa: PLW0603
    _abandoned.append(_importer)
    _importer.close_sockets()
    _importer = Importer()


os.register_at_fork(after_in_child=_begin_anew)
