"""Sets of storages leave a device for its arena while others come back, block by block.

Each direction has a stream of its own, on which a few blocks are always queued. A storage is freed as soon as its last
byte has left, and what comes back takes no more device memory than has left, until all has: two sets that do not fit
together change places. A block is free again as soon as it has arrived, so that the host needs little more than the
larger set.

Where others of the device are in other processes, each process has a transfer, and they take turns: a turn goes on
until some blocks have moved, or until what comes back needs memory that others have yet to free.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.device import Device
from rlcore.engines.offload.chunks import Arrival, Departure, Parcel
from rlcore.engines.offload.host_arena import BLOCK_BYTES, Arena
from rlcore.engines.offload.undo import undone_by
from rlcore.errors import DeviceError
from rlcore.types import OffloadReport

_QUEUED = 3
"""Blocks in each direction that the device has been given: it is not idle while the host frees and allocates."""
_QUEUED_ALONE = 16
"""The same where one direction alone has work, and no other process waits for what it frees: about 40 ms, in which an
allocator maps or unmaps gigabytes."""
_TURN_BLOCKS = 8
"""That move in a turn: many beside the ones queued, few beside those of an engine."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a transfer that takes turns, so far."""

    freed_bytes: int
    """Of device memory, which the device has for other processes."""
    taken_bytes: int
    is_leaving: bool
    is_arriving: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """What others on the device have done, for the next turn."""

    bytes: int
    """Of device memory that may be taken in all, while others are leaving."""
    others_leave: bool


@dataclass(eq=False, slots=True)
class _Queued:
    """A parcel that the device is copying."""

    way: Departure | Arrival
    parcel: Parcel
    done: Any
    keep: Any
    """Views that must live until then."""


class Transfer:
    """All of ``out`` leaves and all of ``in_`` comes back, or, after an error, everything is where it was."""

    def __init__(self, device: Device, arena: Arena, out: Sequence[Departure], in_: Sequence[Arrival]) -> None:
        self._device = device
        self._arena = arena
        self._out, self._in = out, in_
        self._ways: list[Departure | Arrival] = [*out, *in_]
        self._streams: dict[type, Any] = {Departure: device.streams.new(), Arrival: device.streams.new()}
        self._queue: deque[_Queued] = deque()
        self._started = time.perf_counter()
        self._ended: dict[Departure | Arrival, float] = {}
        self._is_first_use = False
        self._grant: Grant | None = None

    def run(self) -> None:
        """All of it; what has left and is not taken again is the device's, for other processes.

        Raises:
            DeviceError: host or device memory does not do. Everything is where it was, or the message says otherwise.
        """
        self.begin()
        if any(way.gathers for way in self._in):
            self._device.memory.empty_cache()  # it would be taken instead of whole pieces
        with undone_by(self._undo):
            self._move()
        if self._freed_bytes > self._taken_bytes:
            self._device.memory.empty_cache()
            self._ended |= dict.fromkeys((way for way in self._out if way.freed_bytes), time.perf_counter())

    def begin(self) -> None:
        """Raises DeviceError, before anything moves, where the host has not enough memory."""
        self._started = time.perf_counter()
        self._is_first_use = self._arena.reserve(self._host_need())
        for stream in self._streams.values():
            stream.wait_stream(self._device.streams.current())

    def turn(self, grant: Grant) -> Progress:
        """Go on for a turn; after an error everything is still whole, and ``backwards`` takes it back.

        Raises:
            DeviceError: host or device memory does not do.
        """
        self._grant = grant
        before = self._freed_bytes
        self._move(self._moved_bytes + _TURN_BLOCKS * BLOCK_BYTES)
        if self._freed_bytes > before:
            self._device.memory.empty_cache()  # other processes are to have it
        return self.progress

    @property
    def progress(self) -> Progress:
        is_arriving = not all(way.is_over for way in self._in)
        return Progress(self._freed_bytes, self._taken_bytes, self._is_leaving, is_arriving)

    def backwards(self) -> Transfer:
        """What brings everything back to where it was."""
        while self._queue:
            self._end_oldest()
        return Transfer(
            self._device,
            self._arena,
            [way.reversed() for way in self._in],
            [Arrival(way.cargo) for way in self._out],
        )

    def reports(self) -> list[OffloadReport]:
        """Of each of ``out``, then of each of ``in_``; their seconds count from the common start."""
        return [self._report(way) for way in self._ways]

    @property
    def is_over(self) -> bool:
        return all(way.is_over for way in self._ways)

    def _host_need(self) -> int:
        """Bytes that must be free before anything moves, so that no direction has to wait for the other for ever."""
        out_bytes = sum(way.rest_bytes for way in self._out)
        in_bytes = sum(way.host_bytes for way in self._in)
        # What comes back waits until as much has left as its next storage takes; what leaves runs ahead by one storage.
        ahead = sum(max((way.largest_bytes for way in ways), default=0) for ways in (self._out, self._in))
        return min(out_bytes, max(0, out_bytes - in_bytes) + ahead + 2 * _QUEUED * BLOCK_BYTES)

    # -------------------------------------------------------------------------------------------- the loop

    @torch.no_grad()
    def _move(self, until_bytes: float = math.inf) -> None:
        while not self.is_over and self._moved_bytes < until_bytes:
            if self._send() | self._fetch():  # not `or`: each direction has its turn
                continue
            if self._queue:
                self._end_oldest()
            elif any(way.rest_bytes for way in self._out):
                self._wait_for_room()
            else:  # what comes back waits for other processes
                return

    def _send(self, *, waits: bool = False) -> bool:
        """Queue the next block that leaves, if there is one and room for it."""
        way = next((way for way in self._out if way.rest_bytes), None)
        if way is None or self._num_queued(Departure) == self._most_queued:
            return False
        block = self._arena.take(way.rest_bytes, waits=waits or not self._in)
        if block is None:
            return False
        parcel = way.pack(block)
        on_host, on_device = parcel.pairs()
        try:
            self._copy(way, parcel, on_host, on_device)
        except BaseException:
            self._arena.give(block)
            raise
        return True

    def _fetch(self) -> bool:
        """Queue the next block that comes back, if there is one and room for it."""
        way = next((way for way in self._in if way.has_rest), None)
        if way is None or self._num_queued(Arrival) == self._most_queued:
            return False
        is_leaving = self._is_leaving or (self._grant is not None and self._grant.others_leave)
        if is_leaving and way.needed_bytes > self._room_bytes:
            return False
        try:
            parcel = way.unpack()
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if is_leaving:  # what was freed lies in pieces: more will be
                return False
            raise DeviceError(
                f"{self._device.name} has no memory for {way.needed_bytes} bytes that come back: "
                f"{str(error).partition(chr(10))[0]}; offload something else first"
            ) from error
        if parcel.block is None:  # there is nothing to copy or to wait for
            self._has_moved(way, parcel)
            return True
        on_host, on_device = parcel.pairs()
        self._copy(way, parcel, on_device, on_host)
        return True

    def _wait_for_room(self) -> None:
        """Nothing is queued, and what leaves has no block: wait for those being allocated, or allocate."""
        rest = sum(way.rest_bytes for way in self._out)
        self._is_first_use |= self._arena.reserve(min(rest, BLOCK_BYTES))
        self._send(waits=True)

    def _copy(self, way: Departure | Arrival, parcel: Parcel, dst: list[Any], src: list[Any]) -> None:
        stream = self._streams[type(way)]
        stream.wait_stream(self._device.streams.current())  # whatever used the memory of new storages before
        self._device.memory.copy_batch(dst, src, stream)
        self._queue.append(_Queued(way, parcel, stream.record_event(), (dst, src)))

    def _end_oldest(self) -> None:
        oldest = self._queue.popleft()
        oldest.done.synchronize()
        oldest.keep = None
        self._has_moved(oldest.way, oldest.parcel)

    def _has_moved(self, way: Departure | Arrival, parcel: Parcel) -> None:
        if isinstance(way, Departure):
            way.has_left(parcel)
        else:
            way.has_arrived(parcel, self._arena)
        if way.is_over:
            self._ended[way] = time.perf_counter()

    @property
    def _most_queued(self) -> int:
        """In each direction."""
        is_alone = self._grant is None and not (self._out and self._in)
        return _QUEUED_ALONE if is_alone else _QUEUED

    def _num_queued(self, kind: type) -> int:
        return sum(isinstance(queued.way, kind) for queued in self._queue)

    @property
    def _is_leaving(self) -> bool:
        return not all(way.is_over for way in self._out)

    @property
    def _room_bytes(self) -> int:
        """Of device memory, that what comes back may take now."""
        return (self._freed_bytes if self._grant is None else self._grant.bytes) - self._taken_bytes

    @property
    def _freed_bytes(self) -> int:
        return sum(way.freed_bytes for way in self._out)

    @property
    def _taken_bytes(self) -> int:
        return sum(way.taken_bytes for way in self._in)

    @property
    def _moved_bytes(self) -> int:
        return sum(way.moved_bytes for way in self._ways)

    # --------------------------------------------------------------------------------------------- the end

    def _undo(self) -> str:
        """Bring everything back to where it was; says where it is."""
        try:
            self.backwards()._move()
        except Exception as failed:
            return (
                f"That could not be undone ({failed}): parts of the tensors are on {self._device.name} and parts in "
                "host memory; build the engine again"
            )
        there = ["what was to leave is on " + self._device.name] * bool(self._out)
        away = ["what was to come back is in host memory"] * bool(self._in)
        return f"Nothing has moved: {', '.join(there + away)}"

    def _report(self, way: Departure | Arrival) -> OffloadReport:
        return OffloadReport(
            moved_bytes=way.moved_bytes,
            freed_device_bytes=way.freed_bytes if isinstance(way, Departure) else -way.taken_bytes,
            seconds=self._ended.get(way, self._started) - self._started,
            pinned=way.is_pinned and way.moved_bytes > 0,
            first_use=self._is_first_use,
        )
