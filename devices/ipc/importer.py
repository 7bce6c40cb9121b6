"""The importing side of IPC: a connection to each exporter, and the exports that this process has open.

A process opens an export once on each device, and counts its mappings; the last one that closes releases the export.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rlcore.devices.ipc.channel import IpcChannel
from rlcore.devices.ipc.exporter import refusal
from rlcore.devices.ipc.mapping import Mapping
from rlcore.devices.ipc.messages import Claim, Granted, Message, Refused, Release, Revoke
from rlcore.devices.ipc.per_process import PerProcess
from rlcore.devices.ipc.socket import connect, ended, pid_of, silent
from rlcore.errors import DeviceError, StateError

_CLAIMS_AHEAD = 32
"""Claims that are sent before their answers arrive; each answer may hold a descriptor."""
_Key = tuple[str, str]
"""Name of a device, and export id."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to open an export."""

    claim: Claim
    open_storage: Callable[[int | None], torch.UntypedStorage]
    """Called with the descriptor of the grant, or None."""
    close_storage: Callable[[], None]
    make: Callable[[torch.UntypedStorage, Callable[[Mapping], None]], Mapping]


class _Connection:
    """A connection to one exporter. A thread receives its messages."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.is_lost = False
        self._lock = threading.Lock()
        self._awaited: set[int] = set()
        self._answers: queue.SimpleQueue[tuple[Granted | Refused | None, int | None]] = queue.SimpleQueue()
        self._mappings: dict[str, list[Mapping]] = {}
        self._revoked: set[str] = set()
        self._channel = IpcChannel(connect(path, timeout_s))
        self.pid = self._channel.peer.pid
        threading.Thread(target=self._listen, name=f"rlcore-ipc-importer-{self.pid}", daemon=True).start()

    def claim(self, claims: Sequence[Claim], deadline: float) -> Generator[int | None]:
        """Claim exports, several ahead of their answers; yield the descriptor of each or None, which the caller closes.

        One thread at a time calls this. It must exhaust or close the generator.

        Raises:
            TimeoutError: the exporter has not answered by ``deadline`` (monotonic).
            StateError: it refuses a claim.
        """
        unsent = iter(claims)
        try:
            for claim in itertools.islice(unsent, _CLAIMS_AHEAD):
                self._send(claim)
            for claim in claims:
                descriptor = self._granted(claim, deadline)
                if (following := next(unsent, None)) is not None:
                    self._send(following)
                yield descriptor
        finally:
            self._discard_answers()

    def _send(self, claim: Claim) -> None:
        with self._lock:
            self._awaited.add(claim.request)
        try:
            self._channel.send(claim)
        except OSError as error:
            self.is_lost = True  # the thread may notice later than the next import
            raise DeviceError(ended(self.pid)) from error

    def _granted(self, claim: Claim, deadline: float) -> int | None:
        """Wait for the answer to the oldest open claim: answers come in order."""
        try:
            answer, descriptor = self._answers.get(timeout=_remaining_s(deadline))
        except queue.Empty as error:
            raise TimeoutError from error
        if answer is None:
            raise DeviceError(ended(self.pid))
        if isinstance(answer, Refused):
            raise StateError(refusal(claim.export_id, self.pid, answer.reason))
        return descriptor

    def release(self, export_id: str) -> None:
        with contextlib.suppress(OSError):  # the exporter has ended
            self._channel.send(Release(export_id))

    def add(self, mapping: Mapping) -> None:
        """Register a mapping for revocations; one may have arrived already."""
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

    def close_in_child(self) -> None:
        self._channel.close_unlocked()

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
            if answer.request in self._awaited:
                self._awaited.remove(answer.request)
                self._answers.put((answer, descriptor))
                return
        self._decline(answer, descriptor)  # it arrived after its deadline

    def _discard_answers(self) -> None:
        """Decline all answers that nobody waits for, also one that has just arrived."""
        with self._lock:
            self._awaited.clear()
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
            return self._channel.receive()
        except DeviceError:  # the other end is not an exporter
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
        self._channel.close()
        for mapping in mappings:
            mapping.revoke()


@dataclass(slots=True)
class _OpenExport:
    storage: torch.UntypedStorage
    connection: _Connection
    count: int = 1


class IpcImporter:
    """The exports of other processes that this process has open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the tables; it is held only for look-ups and changes."""
        self._asking: dict[str, threading.Lock] = {}
        """Path of an exporter -> lock of the thread that connects to it or claims exports."""
        self._connections: dict[str, _Connection] = {}
        self._open_exports: dict[_Key, _OpenExport] = {}

    def open(self, path: str, wanted: Sequence[Wanted], device_name: str, timeout_s: float) -> list[Mapping]:
        """Open exports of the process at ``path`` unless they are open here already, and make a mapping of each."""
        keys = [(device_name, one.claim.export_id) for one in wanted]
        with contextlib.ExitStack() as undo:
            try:
                exports = self._open(path, dict(zip(keys, wanted, strict=True)), time.monotonic() + timeout_s, undo)
            except TimeoutError as error:
                raise DeviceError(silent(pid_of(path), timeout_s)) from error
            mappings = [
                one.make(exports[key].storage, partial(self._release, key, one, exports[key]))
                for key, one in zip(keys, wanted, strict=True)
            ]
            with self._lock:
                for key, count in Counter(keys).items():
                    exports[key].count += count - 1
            undo.pop_all()
        for key, mapping in zip(keys, mappings, strict=True):
            exports[key].connection.add(mapping)
        return mappings

    def _open(
        self, path: str, wanted: dict[_Key, Wanted], deadline: float, undo: contextlib.ExitStack
    ) -> dict[_Key, _OpenExport]:
        """Open or reuse each wanted export, and count one use of each."""
        exports: dict[_Key, _OpenExport] = {}

        def reuse() -> dict[_Key, Wanted]:
            """Count the exports that are open already; return the others."""
            for key, one in wanted.items():
                if key not in exports and (found := self._reuse(key)):
                    keep(key, one, found)
            return {key: one for key, one in wanted.items() if key not in exports}

        def keep(key: _Key, one: Wanted, found: _OpenExport) -> None:
            exports[key] = found
            undo.callback(self._give_back, key, one, found)

        if reuse():
            with self._sole_access(path, deadline):
                missing = reuse()  # another thread may have opened some of them
                connection = self._connection(path, deadline)
                with contextlib.closing(connection.claim([one.claim for one in missing.values()], deadline)) as granted:
                    for (key, one), descriptor in zip(missing.items(), granted, strict=True):
                        found = _OpenExport(_storage(one, connection, descriptor), connection)
                        with self._lock:
                            self._open_exports[key] = found
                        keep(key, one, found)
        return exports

    def _release(self, key: _Key, one: Wanted, export: _OpenExport, mapping: Mapping) -> None:
        export.connection.remove(mapping)
        self._give_back(key, one, export)

    def _give_back(self, key: _Key, one: Wanted, export: _OpenExport) -> None:
        if self._drop(key, export):
            one.close_storage()
            export.connection.release(one.claim.export_id)

    @contextlib.contextmanager
    def _sole_access(self, path: str, deadline: float) -> Iterator[None]:
        """Wait until no other thread claims exports of the process at ``path``, and keep others out."""
        with self._lock:
            asking = self._asking.setdefault(path, threading.Lock())
        if not asking.acquire(timeout=_remaining_s(deadline)):
            raise TimeoutError
        try:
            yield
        finally:
            asking.release()

    def _connection(self, path: str, deadline: float) -> _Connection:
        """Return the connection to an exporter; the caller has ``_sole_access``."""
        known = self._connections.get(path)
        if known is None or known.is_lost:
            known = self._connections[path] = _Connection(path, _remaining_s(deadline))
        return known

    def _reuse(self, key: _Key) -> _OpenExport | None:
        with self._lock:
            export = self._open_exports.get(key)
            if export is None or export.connection.is_lost:
                return None
            export.count += 1
            return export

    def _drop(self, key: _Key, export: _OpenExport) -> bool:
        """Uncount one use; return True if it was the last."""
        with self._lock:
            export.count -= 1
            if export.count == 0 and self._open_exports.get(key) is export:
                del self._open_exports[key]
            return export.count == 0

    def close_sockets(self) -> None:
        """Close the sockets that a forked child inherits: they would hide the end of the importer from exporters."""
        for connection in self._connections.values():
            connection.close_in_child()


def _remaining_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _storage(one: Wanted, connection: _Connection, descriptor: int | None) -> torch.UntypedStorage:
    try:
        return one.open_storage(descriptor)
    except BaseException:
        connection.release(one.claim.export_id)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


_of_process = PerProcess(IpcImporter)


def importer() -> IpcImporter:
    """Return the importer of this process."""
    return _of_process.own
