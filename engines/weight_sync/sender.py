"""The sending side of a weight sync: one trainer rank's tensors, offered in place or packed into staging buffers.

Its methods take and return plain data, so that they can be called over any channel.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.weight_sync.channels.shared_store import store_of
from rlcore.engines.weight_sync.endpoint import endpoint_info
from rlcore.engines.weight_sync.messages import Offer, OfferedTensor, Packing, Relaying, Sending, decoded
from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT, Bucket, BucketPiece, buckets_of, packing
from rlcore.engines.weight_sync.planning.execution import CopyExecution
from rlcore.engines.weight_sync.planning.manifest import WeightManifest
from rlcore.engines.weight_sync.transports.bucket_header import BucketHeader, checksum
from rlcore.engines.weight_sync.transports.events import SlotEvents
from rlcore.engines.weight_sync.transports.exports import Exports
from rlcore.engines.weight_sync.transports.process_group import SyncGroup, Turns
from rlcore.engines.weight_sync.transports.reach import SampleMemory
from rlcore.engines.weight_sync.transports.sent_buckets import SentBuckets
from rlcore.engines.weight_sync.transports.staging_buffers import StagingBuffers, check_slot_bytes, host_device, views
from rlcore.errors import StateError
from rlcore.tensor_data import dtype_name

_here: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
"""The senders of this process, by epoch: receivers of this process read their tensors without a copy."""


class SourceTensors(Protocol):
    """Tensors of one trainer rank, as its sender asks for them."""

    @property
    def manifest(self) -> WeightManifest:
        """The manifest of all ranks, the same on each; another one after the module has been changed."""

    def parts(self) -> list[Tensor]:
        """Return this rank's rows of each parameter, plain and contiguous; the same list while none has moved."""

    def compute(self, weights: Sequence[int]) -> list[Tensor]:
        """Return whole weights that are no views, by their numbers in the manifest; all ranks call it together."""

    def changes(self) -> list[int]:
        """Return what in-place operations on these parts change; empty where that cannot be told."""

    def forget(self) -> None:
        """Hold no tensor until the parts are asked for again."""


class Reader(Protocol):
    """A receiver that copies from a sender's own tensors, in its process."""

    def forget_sources(self) -> None:
        """Hold none of them until they are asked for again."""


def sender_here(epoch: str) -> Sender | None:
    """Return the sender of an epoch if it lives in this process."""
    return _here.get(epoch)


class Sender:
    """One trainer rank's side of every round.

    Args:
        source: the rank's tensors.
        device: where they are.
        address: of this host, at which the receivers' hosts reach it; "" if it is not known.
    """

    def __init__(self, source: SourceTensors, device: Device, *, address: str = "") -> None:
        self._address = address
        self._source = source
        self._device = device
        self._info = endpoint_info(device)
        self._sample = SampleMemory()
        self._staging: StagingBuffers | None = None
        self._events: dict[str, SlotEvents] = {}
        """By the name of the session with the receivers that have them."""
        self._buckets: dict[tuple[str, int], list[Bucket]] = {}
        self._packings: dict[tuple[str, int, int], CopyExecution] = {}
        self._sent = SentBuckets(device)
        self._parts: dict[int, Tensor] = {}
        self._listed: list[Tensor] = []
        self._addresses: list[int] = []
        self._computed: dict[int, Tensor] = {}
        self._exports = Exports(device)
        self._generation = 0
        """It grows whenever the exports of the parts are taken back: they have to be offered anew."""
        self._groups: dict[str, SyncGroup] = {}
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        """The receivers of this process that it was offered to."""
        _here[self._info.epoch] = self

    # ------------------------------------------------------------------------------------------ what is there

    def describe(self) -> bytes:
        """Return the ``EndpointInfo``, encoded."""
        return msgspec.msgpack.encode(self._info)

    def begin(self, is_same: bool) -> list[Any]:
        """Wait for the work that makes the weights.

        Returns:
            The endpoint info, the digest of the manifest, what in-place changes change, a number that is another one
            where what was offered has moved, a random number, and ``is_same`` for all ranks to see.
        """
        self._device.synchronize()
        self._look(again=not is_same)
        manifest, changes = self._source.manifest.digest, self._changes()
        return [self.describe(), manifest, changes, self._generation, secrets.randbits(60), is_same]

    def abandon(self, rendezvous: str) -> None:
        """Release what a round held that has failed."""
        self._computed = {}
        self._sent.drop()
        self.leave(rendezvous)
        self._sample.hide()

    def manifest(self) -> bytes:
        """Return the manifest of all trainer ranks, encoded."""
        return self._source.manifest.to_bytes()

    def show_sample(self) -> bytes:
        """Return a ``Sample`` of memory, encoded, which receivers try to open; it is shared until ``hide_sample``."""
        return self._sample.show()

    def hide_sample(self) -> None:
        """Take the memory of ``show_sample`` back."""
        self._sample.hide()

    def compute(self, weights: list[int]) -> None:
        """Compute weights that are no views, in place of those computed before; all ranks together. [] drops them."""
        self._computed = {}
        first = len(self._source.manifest.parameters)
        self._computed = dict(zip((first + one for one in weights), self._source.compute(weights), strict=True))
        self._device.synchronize()

    def tensors(self) -> Mapping[int, Tensor]:
        """Return this rank's rows of parameters, as ``begin`` found them, by number; computed weights come after them.

        It is the same mapping while none has moved.
        """
        return self._parts | self._computed if self._computed else self._parts

    def _look(self, *, again: bool) -> None:
        """Find where the parts lie now; without ``again`` they are the same tensors as before.

        What receivers have open of parts that have moved is taken back: they would read the old memory for ever. Nor is
        the old memory kept here, by buckets that were packed from it.
        """
        parts = self._source.parts() if again or not self._parts else self._listed
        addresses = [part.data_ptr() for part in parts]
        if addresses != self._addresses:
            self._take_back()
            self._packings = self._packings if parts is self._listed else {}
        if parts is not self._listed or addresses != self._addresses:
            self._listed, self._addresses = parts, addresses
            self._parts = dict(enumerate(parts))

    def _changes(self) -> list[int]:
        versions = self._source.changes()
        return [hash(tuple(versions))] if versions else []

    # ------------------------------------------------------------------------------------------ local, direct

    def offer(self, is_shared: bool) -> list[Any]:
        """Return an ``Offer``, the number of its handles and the bytes of its tensors.

        Memory that is shared with other processes stays exported until ``revoke``.

        Raises:
            UnsupportedError, DeviceError: the memory cannot be shared; says why.
        """
        if not is_shared:
            return [msgspec.msgpack.encode(Offer(epoch=self._info.epoch)), 0, 0]
        parts = {number: part for number, part in self._parts.items() if part.numel()}
        handles, positions = self._device.memory.export_ipc_together(list(parts.values()))
        self._exports.add(handles)
        # Memory of the host has moved to where it can be shared.
        self._addresses = [part.data_ptr() for part in self._listed]
        offered = [
            OfferedTensor(number, handle, offset_bytes, part.numel(), dtype_name(part.dtype))
            for (number, part), (handle, offset_bytes) in zip(parts.items(), positions, strict=True)
        ]
        offer = Offer(epoch=self._info.epoch, handles=handles, tensors=offered)
        return [msgspec.msgpack.encode(offer), len(handles), sum(part.nbytes for part in parts.values())]

    def revoke(self, timeout_s: float = 30.0) -> None:
        """Take the weights' exports back, before their memory leaves the device.

        Raises:
            StateError: a receiver does not let go; the memory stays owned.
        """
        self._sent.leave_device()
        self._take_back(timeout_s)

    def _take_back(self, timeout_s: float = 30.0) -> None:
        self._generation += bool(self._exports)
        self._exports.take_back(timeout_s)

    def forget(self) -> None:
        """Hold none of the tensors until the next ``begin``."""
        self._parts, self._listed, self._computed, self._packings = {}, [], {}, {}
        self._source.forget()
        for reader in list(self.readers):
            reader.forget_sources()

    # ------------------------------------------------------------------------------------- packed, collective

    def open_staging_buffers(self, slot_bytes: int, is_on_host: bool = False) -> bytes:
        """Return the handle of two staging buffers, on the device or on the host; the same until others are asked for.

        Raises:
            DeviceError, UnsupportedError: the memory is not there or cannot be shared; says why.
        """
        if self._staging is not None and self._staging.is_on_host != is_on_host:
            self._drop_staging_buffers(30.0)
        return self._buffers(slot_bytes, is_on_host).handle.to_bytes()

    def _buffers(self, slot_bytes: int, is_on_host: bool = False) -> StagingBuffers:
        """Return the staging buffers, made anew if they have another size."""
        check_slot_bytes(slot_bytes)
        if self._staging is None or self._staging.slot_bytes != slot_bytes:
            self._drop_staging_buffers(30.0)
            self._staging = StagingBuffers(self._device, slot_bytes, is_on_host=is_on_host)
        return self._staging

    def take_plan(self, digest: str, slot_bytes: int, pieces: bytes) -> int:
        """Cut what a plan wants from this rank into buckets; returns how many they are."""
        check_slot_bytes(slot_bytes)
        key = digest, slot_bytes
        if key not in self._buckets:
            self._buckets[key] = buckets_of(decoded(pieces, list[BucketPiece], "list of pieces"), slot_bytes)
        return len(self._buckets[key])

    def keep_sent(self, digests: list[str], slot_bytes: int) -> list[Any]:
        """Have memory for a copy of what these plans send, and give up what is kept for others.

        Returns:
            The round that all copies are of, 0 if there is none, None where these plans want nothing from this rank;
            and the reason why there is no memory, or "".
        """
        wanted = {
            (digest, slot_bytes, number): bucket.nbytes
            for digest in digests
            for number, bucket in enumerate(self._buckets[digest, slot_bytes])
        }
        why_not = self._sent.reserve(wanted)
        return [self._sent.round_id, why_not]

    def pack(self, order: bytes | None) -> int:
        """Pack a slot, as a ``Packing`` says; returns the bytes that it tells.

        The device is done when this returns, unless it waits by events.
        """
        if order is None:
            return 0
        one = decoded(order, Packing, "packing")
        if one.waits_by_event:
            self._events[one.session].wait(one.slot)
        told, nbytes, _ = self._fill(one)
        if one.waits_by_event:
            self._events[one.session].record(one.slot)
        else:
            self._buffers(one.slot_bytes).show(one.slot, nbytes)
            self._device.synchronize()
        return told

    def relay(self, order: bytes | None) -> int:
        """Pack a slot and send it to other ranks, or receive one, as a ``Relaying`` says; returns the bytes sent."""
        if order is None:
            return 0
        one = decoded(order, Relaying, "relaying")
        with self._group(one.rendezvous) as group:
            if one.packing is not None:
                told, nbytes, slot = self._fill(one.packing)
                group.send_message(slot[:nbytes], one.targets)
            else:
                told, slot = 0, self._buffers(one.slot_bytes).slot(one.slot)
                nbytes = group.receive_message(slot, one.source)
            self._device.synchronize()
        return told * len(one.targets)

    def _group(self, rendezvous: str) -> SyncGroup:
        if rendezvous not in self._groups:
            raise StateError("this sender needs a process group to send; call join() first")
        return self._groups[rendezvous]

    def open_events(self, session: str) -> list[Any]:
        """Return this process, and handles of a new event for each slot, or none; see ``SlotEvents``."""
        self._events[session] = SlotEvents(self._device)
        return [self._info.process, self._events[session].export()]

    def import_events(self, session: str, receivers: list[list[bytes]]) -> bool:
        """Open the events of all receivers of a session; returns False where this device cannot wait for them."""
        return self._events[session].import_(receivers)

    def _fill(self, order: Packing) -> tuple[int, int, Tensor]:
        """Pack a slot; returns the bytes that it tells, those in use, and the slot."""
        buckets = self._buckets.get((order.digest, order.slot_bytes))
        if buckets is None:
            raise StateError(f"this sender has no plan {order.digest}; call take_plan() first")
        bucket, slot = buckets[order.bucket], self._buffers(order.slot_bytes).slot(order.slot)
        key = order.digest, order.slot_bytes, order.bucket
        copies = self._packings.get(key) or CopyExecution(packing(bucket))
        if not self._computed:  # what is kept would keep what was computed for this load alone
            self._packings[key] = copies
        if order.is_kept:
            slot[ALIGNMENT : bucket.nbytes].zero_()  # gaps must not count as changes
        copies.run(self.tensors(), views(slot, bucket))
        if order.is_kept:
            used = self._sent.tell(key, slot, bucket, round_id=order.round_id, base=order.base)
            return used - ALIGNMENT if order.base else bucket.payload_bytes, used, slot
        total = checksum(slot[ALIGNMENT : bucket.nbytes]) if order.is_checked else None
        BucketHeader(order.round_id, order.bucket, bucket.nbytes, 0, bucket.nbytes).write(slot, total)
        return bucket.payload_bytes, bucket.nbytes, slot

    def join(self, rendezvous: str, rank: int, world_size: int, timeout_s: float, is_on_host: bool) -> None:
        """Form a process group: for "collective" all senders and receivers together, for "relayed" all senders."""
        meet = store_of(rendezvous, None)
        device = host_device() if is_on_host else self._device
        self._groups[rendezvous] = SyncGroup(device, meet, rank, world_size, timeout_s, address=self._address)

    def leave(self, rendezvous: str) -> None:
        """Leave a process group, if it was joined."""
        found = self._groups.pop(rendezvous, None)
        if found is not None:
            found.leave()

    def send(self, order: bytes) -> int:
        """Pack and send bucket after bucket, as a ``Sending`` says; returns the bytes told to all receivers."""
        sending = decoded(order, Sending, "sending")
        sent = 0
        with Turns(self._device) as turns, self._group(sending.rendezvous) as group:
            wait: Callable[[], None] = lambda: None  # noqa: E731
            for one, ranks in zip(sending.packings, sending.receivers, strict=True):
                told, nbytes, slot = self._fill(one)
                wait()
                wait = turns.start(partial(group.send_message, slot[:nbytes], ranks, is_size_known=one.is_size_known))
                sent += told * len(ranks)
            wait()
            self._device.synchronize()
        return sent

    # -------------------------------------------------------------------------------------------------- end

    def end(self) -> list[int]:
        """Return what in-place changes change, after the last byte has been read."""
        self._computed = {}
        self._device.synchronize()
        return self._changes()

    def close(self, timeout_s: float = 30.0) -> None:
        """Give back everything that others may have open."""
        self.forget()
        for rendezvous in list(self._groups):
            self.leave(rendezvous)
        self._sample.hide(timeout_s)
        self.revoke(timeout_s)
        self._drop_staging_buffers(timeout_s)
        self._sent.drop()

    def _drop_staging_buffers(self, timeout_s: float) -> None:
        self._events = {}
        if self._staging is not None:
            self._staging.close(timeout_s)
            self._staging = None
