"""The exporting side of IPC: a ledger of exported storages, and a socket that answers importers.

The ledger keeps an exported storage alive until ``revoke`` has found that no process has it open. A process ends its
claim by a Release or by its own end. A lost connection alone does not end a claim, because memory that a process still
maps must not be freed.
"""

from __future__ import annotations

import bisect
import collections
import os
import secrets
import selectors
import socket
import threading
import time
from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rlcore._torch_private import storage_key
from rlcore.devices.ipc.channel import IpcChannel
from rlcore.devices.ipc.mapping import Mapping
from rlcore.devices.ipc.messages import Claim, Granted, Message, Refused, Release, Revoke
from rlcore.devices.ipc.per_process import PerProcess
from rlcore.devices.ipc.sharing import SharedMemory
from rlcore.devices.ipc.socket import listen
from rlcore.errors import DeviceError, StateError
from rlcore.process.status import start_time
from rlcore.types import IpcExport

_MOST_UNREAD_GRANTS = 64  # an importer sends 32 claims ahead; each unread grant keeps a descriptor open here
_LOOK_AGAIN_S = 0.01  # for example, for the end of a process whose connection was lost


@dataclass(eq=False, slots=True)
class _ConnectedImporter:
    """One process that has connected to this exporter."""

    channel: IpcChannel
    pid: int
    started: int | None
    is_lost: bool = False
    """Its connection was closed: it has ended, or is about to."""

    def is_gone(self) -> bool:
        return self.is_lost and (self.pid == 0 or start_time(self.pid) != self.started)


@dataclass(eq=False, slots=True)
class Export:
    """Storages that are imported and revoked together: one, or several in one block of device memory."""

    export_id: str
    device_uuid: str
    storages: Sequence[torch.UntypedStorage]
    """The storages by rising address."""
    memory: SharedMemory
    """The shared memory, from the first byte of the first storage."""
    ranges: list[tuple[int, int]] = field(init=False)
    """Address and bytes of each storage at its export."""
    address: int = field(init=False)
    nbytes: int = field(init=False)
    """Bytes of all storages, with the gaps between them."""
    is_revoked: bool = False
    """No new claim is granted."""
    claims: collections.Counter[_ConnectedImporter] = field(default_factory=collections.Counter)
    mappings: list[Mapping] = field(default_factory=list)
    """Mappings of the exporting process itself."""

    def __post_init__(self) -> None:
        self.ranges = [_range_of(storage) for storage in self.storages]
        self.address = self.ranges[0][0]
        self.nbytes = max(address + nbytes for address, nbytes in self.ranges) - self.address

    def storage_at(self, offset_bytes: int) -> tuple[torch.UntypedStorage, int]:
        """Return the storage that holds this byte, and its first byte; both count from the first storage."""
        starts = [address - self.address for address, _ in self.ranges]
        found = bisect.bisect_right(starts, offset_bytes) - 1
        return self.storages[found], starts[found]

    @property
    def has_moved(self) -> bool:
        """Return True if the owner freed or replaced some of the memory in place (``storage.resize_``)."""
        return self.ranges != [_range_of(storage) for storage in self.storages]

    def refusal(self, claim: Claim) -> str:
        """Return why a claim cannot be granted, or ""."""
        if self.is_revoked:
            return "was revoked"
        if self.has_moved:
            return "was freed or resized by its owner since"
        if (claim.device_uuid, claim.payload, claim.storage_bytes) != (
            self.device_uuid,
            self.memory.payload,
            self.nbytes,
        ):
            return "is not what this handle describes"
        return ""


class IpcExporter:
    """The ledger of this process; its socket and thread start with the first export."""

    def __init__(self) -> None:
        self._exporting = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        """Guards the ledger. No slow work holds it, because all other processes would wait."""
        self._exports: dict[str, Export] = {}
        self._ids: dict[int, str] = {}  # storage -> export id
        self._listener: socket.socket | None = None
        self._importers: list[_ConnectedImporter] = []
        self.path = ""
        """Path of the socket; empty before the first export."""

    def export(
        self,
        storages: abc.Mapping[int, torch.UntypedStorage],
        device_uuid: str,
        share: Callable[[torch.UntypedStorage], SharedMemory],
    ) -> dict[int, Export]:
        """Return the export of each storage of one block, by its ``storage_key``.

        A storage keeps its export until that is revoked. Storages without an export get a new one together.

        Raises:
            StateError: a storage was resized while other processes had it open.
        """
        with self._exporting:
            self._start()
            with self._changed:
                known = {one: self._living(one) for one in {self._ids[key] for key in storages if key in self._ids}}
                found = {key: export for key in storages if (export := known.get(self._ids.get(key, "")))}
            if new := [key for key in storages if key not in found]:
                by_address = sorted((storages[key] for key in new), key=_range_of)
                memory = share(by_address[0])  # it may copy the storage
                added = Export(secrets.token_hex(8), device_uuid, by_address, memory)
                found |= dict.fromkeys(new, added)
                with self._changed:
                    self._exports[added.export_id] = added
                    self._ids |= dict.fromkeys(new, added.export_id)
            return found

    def _living(self, export_id: str) -> Export | None:
        """Return an export that can be opened; one of which some memory has moved is forgotten."""
        known = self._exports[export_id]
        if known.has_moved:
            if holders := self._holders(known):
                raise StateError(
                    f"this storage was resized while {_processes(holders)} had it open; "
                    "call revoke(handle) before its memory is freed or offloaded"
                )
            self._forget(known)
            return None
        return None if known.is_revoked else known

    def open_here(self, claim: Claim, make: Callable[[Export], Mapping]) -> Mapping:
        """Return a mapping of this process's own storage."""
        with self._changed:
            export = self._exports.get(claim.export_id)
            reason = "was revoked" if export is None else export.refusal(claim)
            if export is None or reason:
                raise StateError(refusal(claim.export_id, os.getpid(), reason))
            mapping = make(export)
            export.mappings.append(mapping)
            return mapping

    def close_here(self, mapping: Mapping) -> None:
        with self._changed:
            self._exports[mapping.handle.export_id].mappings.remove(mapping)
            self._changed.notify_all()

    def revoke(self, export_id: str, timeout_s: float) -> None:
        """Ask every process that has the export open to close it, wait for all, and release the storages.

        Raises:
            StateError: it was revoked before, or some process still has it open after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            export = self._exports.get(export_id)
            if export is None:
                raise StateError(f"export {export_id} was revoked before; export the tensor again to share it")
            importers = [] if export.is_revoked else list(export.claims)
            mappings = list(export.mappings)
            export.is_revoked = True
        for importer in importers:
            _send(importer, Revoke(export_id))
        for mapping in mappings:
            mapping.revoke()
        with self._changed:
            while holders := self._holders(export):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise StateError(
                        f"export {export_id} is still open in {_processes(holders)} after {timeout_s:g} s; the memory "
                        "stays owned: close the mappings there, or end the processes, and revoke again"
                    )
                is_watched = any(importer.is_lost for importer in export.claims)
                self._changed.wait(min(remaining_s, _LOOK_AGAIN_S) if is_watched else remaining_s)
            if export_id not in self._exports:
                raise StateError(f"export {export_id} was revoked by another thread")
            self._forget(export)

    def ledger(self) -> list[IpcExport]:
        with self._changed:
            return [
                IpcExport(
                    export.export_id,
                    export.device_uuid,
                    address if (address, nbytes) == _range_of(storage) else 0,
                    nbytes,
                    self._holders(export),
                )
                for export in self._exports.values()
                for storage, (address, nbytes) in zip(export.storages, export.ranges, strict=True)
            ]

    def _holders(self, export: Export) -> dict[int, int]:
        """Return process id -> number of claims; claims of ended processes are removed."""
        for importer in [importer for importer in export.claims if importer.is_gone()]:
            del export.claims[importer]
        holders = collections.Counter({importer.pid: count for importer, count in export.claims.items()})
        holders[os.getpid()] += len(export.mappings)
        return dict(+holders)

    def _forget(self, export: Export) -> None:
        del self._exports[export.export_id]
        for storage in export.storages:
            if self._ids.get(storage_key(storage)) == export.export_id:
                del self._ids[storage_key(storage)]
        if export.memory.descriptor is not None:
            os.close(export.memory.descriptor)

    # ------------------------------------------------------------------------------- the socket and its thread

    def _start(self) -> None:
        if self._listener is not None:
            return
        self._listener, path = listen()
        self.path = str(path)
        threading.Thread(target=self._serve, args=(self._listener,), name="rlcore-ipc-exporter", daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        self._accept(listener, selector)
                    elif not self._handle(key.data):
                        selector.unregister(key.fileobj)
                        self._lose(key.data)

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the importer is gone again, or this process has no descriptors left
            time.sleep(_LOOK_AGAIN_S)
            return
        channel = IpcChannel(connection)
        peer = channel.peer
        if peer.uid != os.getuid():
            channel.close()
            return
        importer = _ConnectedImporter(channel, peer.pid, start_time(peer.pid))
        selector.register(channel, selectors.EVENT_READ, importer)
        with self._changed:
            self._importers.append(importer)

    def _handle(self, importer: _ConnectedImporter) -> bool:
        """Handle one message; return False at the end of the connection."""
        try:
            received = importer.channel.receive()
        except DeviceError:
            return False
        if received is None:
            return False
        message, descriptor = received
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(message, Claim):
            return self._grant(importer, message)
        if isinstance(message, Release):
            self._release(importer, message.export_id)
            return True
        return False

    def _grant(self, importer: _ConnectedImporter, claim: Claim) -> bool:
        with self._changed:
            export = self._exports.get(claim.export_id)
            reason = "was revoked" if export is None else export.refusal(claim)
            descriptor = None
            reply: Message = Refused(claim.request, reason)
            if export is not None and not reason:
                export.claims[importer] += 1
                reply, descriptor = Granted(claim.request, claim.export_id), export.memory.descriptor
            return _send(importer, reply, descriptor) and importer.channel.num_descriptors_waiting < _MOST_UNREAD_GRANTS

    def _release(self, importer: _ConnectedImporter, export_id: str) -> None:
        with self._changed:
            export = self._exports.get(export_id)
            if export is not None:
                export.claims = +(export.claims - collections.Counter([importer]))
                self._changed.notify_all()

    def _lose(self, importer: _ConnectedImporter) -> None:
        with self._changed:
            importer.channel.close()
            importer.is_lost = True
            self._importers.remove(importer)
            self._changed.notify_all()

    def close_sockets(self) -> None:
        """Close the sockets that a forked child inherits: they would hide the end of the exporter from importers."""
        for importer in self._importers:
            importer.channel.close_unlocked()
        if self._listener is not None:
            self._listener.close()


def _range_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _send(importer: _ConnectedImporter, message: Message, descriptor: int | None = None) -> bool:
    try:
        importer.channel.send(message, descriptor)
    except OSError:  # the importer has ended, which the thread that waits for its release notices
        return False
    return True


def _processes(holders: dict[int, int]) -> str:
    return f"process{'es' if len(holders) > 1 else ''} {', '.join(map(str, sorted(holders)))}"


def refusal(export_id: str, pid: int, reason: str) -> str:
    return f"export {export_id} of process {pid} {reason}; export the tensor again"


_of_process = PerProcess(IpcExporter)


def exporter() -> IpcExporter:
    """Return the exporter of this process."""
    return _of_process.own
