"""Copies to the host and to the device that run at once, block by block, on one device.

Each direction has a stream of its own, on which a few blocks are always queued. A storage is freed as soon as its last
byte has left. Until everything has left, what comes back takes no more device memory than has been freed: so two sets
that do not fit together on the device change places. A block is free again as soon as its bytes are on the device, so
the host needs little more memory than the larger set.

When others on the device live in other processes, each process has a transfer of its own, and they advance in rounds. A
step of a round ends when some blocks have moved, or when what comes back needs memory that another process must free.
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
from rlcore.engines.offload.chunks import Chunk
from rlcore.engines.offload.device_to_host import DeviceToHost
from rlcore.engines.offload.host_arena import BLOCK_BYTES, HostArena
from rlcore.engines.offload.host_to_device import HostToDevice
from rlcore.engines.offload.undo import undone_by
from rlcore.errors import DeviceError, first_line
from rlcore.types import OffloadReport

_QUEUED = 3
"""Blocks in each direction that the device has been given: it is not idle while the host frees and allocates."""
_QUEUED_ALONE = 16
"""The same when only one direction has work, and no other process waits for what it frees: about 40 ms, in which an
allocator maps or unmaps gigabytes."""
_STEP_BLOCKS = 8
"""Blocks that move in a step of a round: many compared with the queued ones, few compared with those of an engine."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a transfer after a step."""

    freed_bytes: int
    """Device memory freed so far, which other processes may take."""
    allocated_bytes: int
    """Device memory allocated so far."""
    has_device_to_host: bool
    """Something has still to leave the device."""
    has_host_to_device: bool
    """Something has still to come back."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The device memory that a step may use."""

    bytes: int
    """The most bytes that the transfer may have allocated in all, while others still leave the device."""
    others_leave: bool
    """Others on the device have still something to free."""


@dataclass(eq=False, slots=True)
class _QueuedChunk:
    """A chunk that the device is copying."""

    copy: DeviceToHost | HostToDevice
    chunk: Chunk
    done: Any
    keep: Any
    """Views that must live until the copy is done."""


class Transfer:
    """Run all copies ``out`` to the host and ``in_`` to the device at once; after an error nothing has moved."""

    def __init__(
        self, device: Device, arena: HostArena, out: Sequence[DeviceToHost], in_: Sequence[HostToDevice]
    ) -> None:
        self._device = device
        self._arena = arena
        self._out, self._in = out, in_
        self._copies: list[DeviceToHost | HostToDevice] = [*out, *in_]
        self._streams: dict[type, Any] = {DeviceToHost: device.streams.new(), HostToDevice: device.streams.new()}
        self._queue: deque[_QueuedChunk] = deque()
        self._started = time.perf_counter()
        self._ended: dict[DeviceToHost | HostToDevice, float] = {}
        self._is_first_use = False
        self._grant: Grant | None = None

    def run(self) -> None:
        """Run all copies to their end, and give the device memory that is free then to other processes.

        Raises:
            DeviceError: there is too little host or device memory. Everything is where it was, or the message says
                what is not.
        """
        self.begin()
        if any(copy.needs_segments for copy in self._in):
            self._device.memory.empty_cache()  # cached memory would be used instead of new segments
        with undone_by(self._undo):
            self._move()
        if self._freed_bytes > self._allocated_bytes:
            self._device.memory.empty_cache()
            self._ended |= dict.fromkeys((copy for copy in self._out if copy.freed_bytes), time.perf_counter())

    def begin(self) -> None:
        """Reserve host memory; raises DeviceError, before anything moves, when the host has too little."""
        self._started = time.perf_counter()
        self._is_first_use = self._arena.reserve(self._host_need())
        for stream in self._streams.values():
            stream.wait_stream(self._device.streams.current())

    def step(self, grant: Grant) -> Progress:
        """Advance by one step of a round. After an error every byte is still somewhere: ``reversed`` takes it back.

        Raises:
            DeviceError: there is too little host or device memory.
        """
        self._grant = grant
        before = self._freed_bytes
        self._move(self._moved_bytes + _STEP_BLOCKS * BLOCK_BYTES)
        if self._freed_bytes > before:
            self._device.memory.empty_cache()  # other processes take it
        return self.progress

    @property
    def progress(self) -> Progress:
        has_host_to_device = not all(copy.is_done for copy in self._in)
        return Progress(self._freed_bytes, self._allocated_bytes, self._has_device_to_host, has_host_to_device)

    def reversed(self) -> Transfer:
        """Return the transfer that brings everything back to where it was."""
        while self._queue:
            self._finish_oldest()
        return Transfer(
            self._device,
            self._arena,
            [copy.reversed() for copy in self._in],
            [HostToDevice(copy.chunks) for copy in self._out],
        )

    def reports(self) -> list[OffloadReport]:
        """Return a report of each of ``out``, then of each of ``in_``; all seconds count from the common start."""
        return [self._report(copy) for copy in self._copies]

    @property
    def is_done(self) -> bool:
        return all(copy.is_done for copy in self._copies)

    def _host_need(self) -> int:
        """Return the bytes that must be free at the start, so that neither direction waits for the other for ever."""
        out_bytes = sum(copy.remaining_bytes for copy in self._out)
        in_bytes = sum(copy.host_bytes for copy in self._in)
        # What comes back waits until as much has left as its next storage takes; what leaves runs ahead by one storage.
        ahead = sum(max((copy.largest_bytes for copy in copies), default=0) for copies in (self._out, self._in))
        return min(out_bytes, max(0, out_bytes - in_bytes) + ahead + 2 * _QUEUED * BLOCK_BYTES)

    # -------------------------------------------------------------------------------------------- the loop

    @torch.no_grad()
    def _move(self, until_bytes: float = math.inf) -> None:
        while not self.is_done and self._moved_bytes < until_bytes:
            if self._queue_device_to_host() | self._queue_host_to_device():  # not `or`: both directions are tried
                continue
            if self._queue:
                self._finish_oldest()
            elif any(copy.remaining_bytes for copy in self._out):
                self._wait_for_block()
            else:  # what comes back waits for other processes
                return

    def _queue_device_to_host(self, *, waits: bool = False) -> bool:
        """Queue the next block that leaves; return False if there is none or no room for it."""
        copy = next((copy for copy in self._out if copy.remaining_bytes), None)
        if copy is None or self._num_queued(DeviceToHost) == self._most_queued:
            return False
        block = self._arena.take(copy.remaining_bytes, waits=waits or not self._in)
        if block is None:
            return False
        chunk = copy.pack(block)
        on_host, on_device = chunk.pairs()
        try:
            self._copy(copy, chunk, on_host, on_device)
        except BaseException:
            self._arena.give(block)
            raise
        return True

    def _queue_host_to_device(self) -> bool:
        """Queue the next block that comes back; return False if there is none or no room for it."""
        copy = next((copy for copy in self._in if copy.has_next), None)
        if copy is None or self._num_queued(HostToDevice) == self._most_queued:
            return False
        will_be_freed = self._has_device_to_host or (self._grant is not None and self._grant.others_leave)
        if will_be_freed and copy.next_bytes > self._free_bytes:
            return False
        try:
            chunk = copy.next_chunk()
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if will_be_freed:  # the freed memory is fragmented: more will be freed
                return False
            raise DeviceError(
                f"{self._device.name} has no memory for {copy.next_bytes} bytes that come back: "
                f"{first_line(error)}; offload something else first"
            ) from error
        if chunk.block is None:  # there is nothing to copy or to wait for
            self._complete(copy, chunk)
            return True
        on_host, on_device = chunk.pairs()
        self._copy(copy, chunk, on_device, on_host)
        return True

    def _wait_for_block(self) -> None:
        """Wait for host blocks that are being allocated, or allocate: nothing is queued, and no block is free."""
        remaining = sum(copy.remaining_bytes for copy in self._out)
        self._is_first_use |= self._arena.reserve(min(remaining, BLOCK_BYTES))
        self._queue_device_to_host(waits=True)

    def _copy(self, copy: DeviceToHost | HostToDevice, chunk: Chunk, dst: list[Any], src: list[Any]) -> None:
        stream = self._streams[type(copy)]
        stream.wait_stream(self._device.streams.current())  # whatever used the memory of new storages before
        self._device.memory.copy_batch(dst, src, stream)
        self._queue.append(_QueuedChunk(copy, chunk, stream.record_event(), (dst, src)))

    def _finish_oldest(self) -> None:
        oldest = self._queue.popleft()
        oldest.done.synchronize()
        oldest.keep = None
        self._complete(oldest.copy, oldest.chunk)

    def _complete(self, copy: DeviceToHost | HostToDevice, chunk: Chunk) -> None:
        if isinstance(copy, DeviceToHost):
            copy.complete(chunk)
        else:
            copy.complete(chunk, self._arena)
        if copy.is_done:
            self._ended[copy] = time.perf_counter()

    @property
    def _most_queued(self) -> int:
        """The number of blocks that each direction may have queued."""
        is_alone = self._grant is None and not (self._out and self._in)
        return _QUEUED_ALONE if is_alone else _QUEUED

    def _num_queued(self, kind: type) -> int:
        return sum(isinstance(queued.copy, kind) for queued in self._queue)

    @property
    def _has_device_to_host(self) -> bool:
        return not all(copy.is_done for copy in self._out)

    @property
    def _free_bytes(self) -> int:
        """The device memory that what comes back may take now."""
        return (self._freed_bytes if self._grant is None else self._grant.bytes) - self._allocated_bytes

    @property
    def _freed_bytes(self) -> int:
        return sum(copy.freed_bytes for copy in self._out)

    @property
    def _allocated_bytes(self) -> int:
        return sum(copy.allocated_bytes for copy in self._in)

    @property
    def _moved_bytes(self) -> int:
        return sum(copy.moved_bytes for copy in self._copies)

    # --------------------------------------------------------------------------------------------- the end

    def _undo(self) -> str:
        """Bring everything back to where it was; return words that say where it is."""
        try:
            self.reversed()._move()
        except Exception as failed:
            return (
                f"That could not be undone ({failed}): parts of the tensors are on {self._device.name} and parts in "
                "host memory; build the engine again"
            )
        there = ["what was to leave is on " + self._device.name] * bool(self._out)
        away = ["what was to come back is in host memory"] * bool(self._in)
        return f"Nothing has moved: {', '.join(there + away)}"

    def _report(self, copy: DeviceToHost | HostToDevice) -> OffloadReport:
        return OffloadReport(
            moved_bytes=copy.moved_bytes,
            freed_device_bytes=copy.freed_bytes if isinstance(copy, DeviceToHost) else -copy.allocated_bytes,
            seconds=self._ended.get(copy, self._started) - self._started,
            pinned=copy.is_pinned and copy.moved_bytes > 0,
            first_use=self._is_first_use,
        )
