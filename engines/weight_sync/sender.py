"""The sending side of a weight sync: one trainer rank's tensors, offered in place or packed into slabs.

Its methods take and give plain data, so that they can be called over any channel.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.weight_sync.endpoint import decoded, place_of
from rlcore.engines.weight_sync.planning.copies import Mover
from rlcore.engines.weight_sync.planning.manifest import Manifest
from rlcore.engines.weight_sync.transports.events import Marks
from rlcore.engines.weight_sync.transports.process_group import Meeting
from rlcore.engines.weight_sync.transports.slabs import (
    Bucket,
    Piece,
    Slabs,
    check_slot_bytes,
    fill,
    packing,
    stamp,
    views,
)
from rlcore.errors import StateError
from rlcore.tensor_data import dtype_name
from rlcore.types import IpcHandle

_here: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
"""The senders of this process, by epoch: receivers of this process read their tensors without a copy."""


class Holding(Protocol):
    """What a trainer rank has."""

    @property
    def manifest(self) -> Manifest:
        """The same on all ranks; another one after the module has been changed."""

    def parts(self) -> list[Tensor]:
        """This rank's rows of each parameter, plain and contiguous; the same list while none has moved."""

    def compute(self, weights: Sequence[int]) -> list[Tensor]:
        """Whole weights that are no views, by their numbers in the manifest; all ranks call it together."""

    def changes(self) -> list[int]:
        """What in-place operations change of these parts; empty where that cannot be told."""


class Offered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one tensor is."""

    number: int
    """As in ``Sender.tensors``."""
    handle: int
    """Index in ``Offer.handles``."""
    offset_bytes: int
    numel: int
    dtype: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """How a receiver reaches the tensors of one sender; one in the sender's process has them without handles."""

    epoch: str
    handles: list[IpcHandle] | None = None
    """Of blocks of memory, as bytes; None: it cannot be reached from other processes."""
    tensors: list[Offered] = []
    """Those that are not empty."""


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket that a sender is to fill, or a receiver to empty."""

    round_id: int
    digest: str
    """Of the plan."""
    slot_bytes: int
    bucket: int
    slot: int
    is_checked: bool
    is_marked: bool = False
    """The two sides' devices wait for each other (``Marks``), not each process for its own."""
    sender: int = 0
    """Position among the senders; for receivers."""


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """All buckets that a sender gives, in order, and the ranks of a meeting that take each."""

    meeting: str
    packings: list[Packing]
    receivers: list[list[int]]


def sender_here(epoch: str) -> Sender | None:
    """The sender if it lives in this process."""
    return _here.get(epoch)


class Sender:
    """Of one trainer rank."""

    def __init__(self, holding: Holding, device: Device) -> None:
        self._holding = holding
        self._device = device
        self._place = place_of(device)
        self._slabs: Slabs | None = None
        self._marks = Marks(device)
        self._buckets: dict[tuple[str, int], list[Bucket]] = {}
        self._movers: dict[tuple[str, int, int], Mover] = {}
        self._parts: dict[int, Tensor] = {}
        self._listed: list[Tensor] = []
        self._addresses: list[int] = []
        self._computed: dict[int, Tensor] = {}
        self._exports: dict[str, IpcHandle] = {}
        self._num_revoked = 0
        self._meetings: dict[str, Meeting] = {}
        _here[self._place.epoch] = self

    # ------------------------------------------------------------------------------------------ what is there

    def describe(self) -> bytes:
        """The ``Place``."""
        return msgspec.msgpack.encode(self._place)

    def begin(self, is_same: bool) -> list[Any]:
        """Wait for the work that makes the weights.

        Returns:
            place, digest of the manifest, what in-place changes change, how often exports were taken back, a random
            number, and ``is_same`` for all ranks to see.
        """
        self._device.synchronize()
        self._look(again=not is_same)
        manifest, changes = self._holding.manifest.digest, self._changes()
        return [self.describe(), manifest, changes, self._num_revoked, secrets.randbits(60), is_same]

    def abandon(self, meeting: str) -> None:
        """A round has failed: what it held is given up."""
        self._computed = {}
        self.leave(meeting)

    def manifest(self) -> bytes:
        """What all trainer ranks hold together."""
        return self._holding.manifest.to_bytes()

    def compute(self, weights: list[int]) -> None:
        """Make weights that are no views, instead of those made before; all ranks together. [] drops them."""
        self._computed = {}
        first = len(self._holding.manifest.parameters)
        self._computed = dict(zip((first + one for one in weights), self._holding.compute(weights), strict=True))
        self._device.synchronize()

    def tensors(self) -> Mapping[int, Tensor]:
        """By number: this rank's rows of parameters, since ``begin``; computed weights are counted after them.

        The same mapping while none has moved.
        """
        return self._parts | self._computed if self._computed else self._parts

    def _look(self, *, again: bool) -> None:
        """Find the parts where they lie now; without ``again`` they are the tensors they were."""
        parts = self._holding.parts() if again or not self._parts else self._listed
        addresses = [part.data_ptr() for part in parts]
        if parts is not self._listed or addresses != self._addresses:
            self._listed, self._addresses = parts, addresses
            self._parts = dict(enumerate(parts))

    def _changes(self) -> list[int]:
        versions = self._holding.changes()
        return [hash(tuple(versions))] if versions else []

    # ------------------------------------------------------------------------------------------ local, direct

    def offer(self, is_shared: bool) -> list[Any]:
        """An ``Offer``, its handles, their bytes. What is shared with other processes stays exported until ``revoke``.

        Raises:
            UnsupportedError, DeviceError: the memory cannot be shared; says why.
        """
        if not is_shared:
            return [msgspec.msgpack.encode(Offer(epoch=self._place.epoch)), 0, 0]
        parts = {number: part for number, part in self._parts.items() if part.numel()}
        handles, places = self._device.memory.export_ipc_together(list(parts.values()))
        self._exports |= {handle.export_id: handle for handle in handles}
        offered = [
            Offered(number, handle, offset_bytes, part.numel(), dtype_name(part.dtype))
            for (number, part), (handle, offset_bytes) in zip(parts.items(), places, strict=True)
        ]
        offer = Offer(epoch=self._place.epoch, handles=handles, tensors=offered)
        return [msgspec.msgpack.encode(offer), len(handles), sum(part.nbytes for part in parts.values())]

    def revoke(self, timeout_s: float = 30.0) -> None:
        """Take the weights' exports back, before their memory leaves the device.

        Raises:
            StateError: a receiver does not let go; the memory stays owned.
        """
        self._num_revoked += bool(self._exports)
        living = {export.export_id for export in self._device.memory.ledger()} if self._exports else set()
        while self._exports:
            export_id, handle = next(iter(self._exports.items()))
            if export_id in living:
                self._device.memory.revoke(handle, timeout_s=timeout_s)
            del self._exports[export_id]

    def forget(self) -> None:
        """Hold none of the tensors, until the next ``begin``."""
        self._parts, self._listed, self._computed, self._movers = {}, [], {}, {}

    # ------------------------------------------------------------------------------------- packed, collective

    def open_slabs(self, slot_bytes: int, is_on_host: bool = False) -> bytes:
        """The handle of two slots, on the device or on the host; the same until others are asked for.

        Raises:
            DeviceError, UnsupportedError: the memory is not there or cannot be shared; says why.
        """
        if self._slabs is not None and self._slabs.is_on_host != is_on_host:
            self._drop_slabs(30.0)
        return self._slots(slot_bytes, is_on_host).handle.to_bytes()

    def _slots(self, slot_bytes: int, is_on_host: bool = False) -> Slabs:
        """Those that there are, if they are of this size."""
        check_slot_bytes(slot_bytes)
        if self._slabs is None or self._slabs.slot_bytes != slot_bytes:
            self._drop_slabs(30.0)
            self._slabs = Slabs(self._device, slot_bytes, is_on_host=is_on_host)
        return self._slabs

    def take_plan(self, digest: str, slot_bytes: int, pieces: bytes) -> int:
        """What a plan wants from this rank; the number of buckets that it takes."""
        check_slot_bytes(slot_bytes)
        key = digest, slot_bytes
        if key not in self._buckets:
            self._buckets[key] = fill(decoded(pieces, list[Piece], "list of pieces"), slot_bytes)
        return len(self._buckets[key])

    def pack(self, order: bytes | None) -> int:
        """Fill a slot, as a ``Packing`` says; the payload's bytes. Done when this returns, unless marked."""
        if order is None:
            return 0
        packing = decoded(order, Packing, "packing")
        if packing.is_marked:
            self._marks.wait(packing.slot)
        bucket, _ = self._fill(packing)
        if packing.is_marked:
            self._marks.set(packing.slot)
        else:
            self._slots(packing.slot_bytes).show(packing.slot, bucket.nbytes)
            self._device.synchronize()
        return bucket.payload_bytes

    def open_marks(self) -> list[Any]:
        """This process, and handles of an event for each slot, or none; see ``Marks``."""
        return [self._place.process, self._marks.make()]

    def know_marks(self, receivers: list[list[bytes]]) -> bool:
        """Take those of all receivers; whether this device can wait for them."""
        return self._marks.know(receivers)

    def _fill(self, order: Packing) -> tuple[Bucket, Tensor]:
        buckets = self._buckets.get((order.digest, order.slot_bytes))
        if buckets is None:
            raise StateError(f"this sender has no plan {order.digest}; call take_plan() first")
        bucket, slot = buckets[order.bucket], self._slots(order.slot_bytes).slot(order.slot)
        key = order.digest, order.slot_bytes, order.bucket
        mover = self._movers.get(key) or Mover(packing(bucket))
        if not self._computed:  # a mover that is kept would keep what was computed for this load alone
            self._movers[key] = mover
        mover.run(self.tensors(), views(slot, bucket))
        stamp(slot, order.round_id, order.bucket, bucket, is_checked=order.is_checked)
        return bucket, slot

    def join(self, meeting: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Form a group for the route "collective", through a folder; all senders and receivers together."""
        self._meetings[meeting] = Meeting(self._device, meeting, rank, world_size, timeout_s)

    def leave(self, meeting: str) -> None:
        """Leave a group, if it was joined."""
        found = self._meetings.pop(meeting, None)
        if found is not None:
            found.leave()

    def send(self, order: bytes) -> int:
        """Fill and send bucket after bucket, as a ``Sending`` says; the payload's bytes."""
        sending = decoded(order, Sending, "sending")
        if sending.meeting not in self._meetings:
            raise StateError("send() needs a group; call join() first")
        sent = 0
        for one, ranks in zip(sending.packings, sending.receivers, strict=True):
            bucket, slot = self._fill(one)
            self._meetings[sending.meeting].send(slot[: bucket.nbytes], ranks)
            sent += bucket.payload_bytes * len(ranks)
        self._device.synchronize()
        return sent

    # -------------------------------------------------------------------------------------------------- end

    def end(self) -> list[int]:
        """What in-place changes change, after the last byte has been read."""
        self._computed = {}
        self._device.synchronize()
        return self._changes()

    def close(self, timeout_s: float = 30.0) -> None:
        """Give back everything that others may have open."""
        self.forget()
        for meeting in list(self._meetings):
            self.leave(meeting)
        self.revoke(timeout_s)
        self._drop_slabs(timeout_s)

    def _drop_slabs(self, timeout_s: float) -> None:
        self._marks.drop()
        slabs, self._slabs = self._slabs, None
        if slabs is not None:
            slabs.close(timeout_s)
