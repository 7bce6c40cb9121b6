"""Host memory that everything offloaded from one device of this process shares.

Each allocation has the exact size that is missing. It is touched and registered once, and kept: the room that one
engine leaves when its tensors come back serves the next engine. Allocations are lent in blocks, the unit of a copy.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from rlcore import held_memory
from rlcore.device import Device
from rlcore.engines.offload.host_limits import HostLimit, cgroup_limits, lock_limit_bytes
from rlcore.errors import DeviceError, InvalidInputError, StateError

_log = logging.getLogger(__name__)

BLOCK_BYTES = 128 << 20
"""About 2.5 ms of a link of 50 GB/s: large compared with the cost of a call, small compared with a device's memory."""
_ALLOCATION_BYTES = 1 << 30
"""Enough work for all threads that touch its pages. Each allocation is one registration, and a batch of copies looks
at all registrations."""
_ALIGNMENT = 64
"""The alignment of tensors in a block: a cache line. The size of a block is a multiple of it."""
_RAISE_OWN_LIMIT = "raise the limit (set by the last build() in this process that gave one; pass host_memory_bytes=)"


@dataclass(eq=False, slots=True)
class HostAllocation:
    """Host memory that is allocated and freed as a whole."""

    tensor: Tensor
    """[nbytes] uint8."""
    buffer: Any
    """The ``HostBuffer``; None for pageable memory."""
    num_lent: int = 0
    """The number of its blocks that are lent."""

    @property
    def is_pinned(self) -> bool:
        return self.buffer is not None and self.buffer.is_pinned


@dataclass(eq=False, slots=True)
class HostBlock:
    """A part of an allocation, lent by ``HostArena.take`` until ``HostArena.give``."""

    tensor: Tensor
    """[nbytes] uint8."""
    allocation: HostAllocation
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.tensor.numel()

    @property
    def is_pinned(self) -> bool:
        return self.allocation.is_pinned


def aligned(nbytes: int) -> int:
    """Return the bytes that so many take in a block."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostArena:
    """The host memory of one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allocations: list[HostAllocation] = []
        self._free: list[HostBlock] = []  # by size
        self._limit_bytes: int | None = None
        self._growing_bytes = 0
        self._num_trims = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        held_memory.report(self, HostArena._held)

    def _held(self) -> dict[str, int]:
        of = f"host memory for offloads and saves of {self._device.name}"
        free = sum(block.nbytes for block in list(self._free))  # no lock: the thread that asks may have it
        total = sum(allocation.tensor.numel() for allocation in list(self._allocations))
        return {f"{of}, in use": total - free, f"{of}, free": free}

    # ----------------------------------------------------------------------------------------------- size

    @property
    def total_bytes(self) -> int:
        with self._changed:
            return sum(allocation.tensor.numel() for allocation in self._allocations)

    @property
    def free_bytes(self) -> int:
        with self._changed:
            return sum(block.nbytes for block in self._free)

    @property
    def is_growing(self) -> bool:
        return self._growing_bytes > 0

    @property
    def limit_bytes(self) -> int | None:
        """The limit that ``set_limit`` was given."""
        return self._limit_bytes

    def set_limit(self, host_memory_bytes: int | None) -> None:
        """Set the most bytes to hold at any time; None leaves it to the limits of the process.

        Raises:
            InvalidInputError: it is no whole number of at least 1, and not None.
        """
        if host_memory_bytes is not None and (type(host_memory_bytes) is not int or host_memory_bytes < 1):
            raise InvalidInputError(
                f"host_memory_bytes must be a whole number of at least 1 or None, got {host_memory_bytes!r}"
            )
        self._limit_bytes = host_memory_bytes

    def reserve(self, nbytes: int) -> bool:
        """Allocate in the background what is missing of ``nbytes`` free bytes; return True if something is missing.

        Raises:
            DeviceError: the limits of this process do not allow it; nothing is allocated then.
        """
        with self._changed:
            missing = nbytes - sum(block.nbytes for block in self._free) - self._growing_bytes
            if missing <= 0:
                return self.is_growing
            missing = aligned(missing)
            self._check_room(missing)
            self._growing_bytes += missing
            self._failure = None
            arguments = missing, self._num_trims
        threading.Thread(target=self._grow, args=arguments, name="rlcore-offload-arena", daemon=True).start()
        return True

    def wait(self) -> None:
        """Wait until everything reserved is allocated; raise the error of the allocation."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_growing)
            self._raise_failure()

    def trim(self) -> int:
        """Give allocations without a lent block back to the host; return their bytes.

        One that is still being made goes back as soon as it is there. ``trim`` does not wait for it, because the
        garbage collector may call ``trim`` in the very thread that allocates.
        """
        with self._changed:
            self._num_trims += 1
            self._growing_bytes = 0
            self._changed.notify_all()
            unused = [allocation for allocation in self._allocations if not allocation.num_lent]
            self._allocations = [allocation for allocation in self._allocations if allocation.num_lent]
            self._free = [block for block in self._free if block.allocation.num_lent]
        freed = sum(allocation.tensor.numel() for allocation in unused)
        for allocation in unused:
            self._free_allocation(allocation)
        return freed

    def _free_allocation(self, allocation: HostAllocation) -> None:
        buffer = allocation.buffer
        del allocation.tensor, allocation.buffer
        if buffer is not None:
            with contextlib.suppress(StateError):  # a traceback still holds a view: unmapped when that goes
                self._device.memory.host_free(buffer)

    # --------------------------------------------------------------------------------------------- lending

    def take(self, wanted: int, *, waits: bool) -> HostBlock | None:
        """Lend a free block: the smallest that holds ``wanted`` bytes, else the largest.

        Returns None when no block is free. With ``waits`` that means that none becomes free before blocks are given
        back. Raises the error of an allocation in the background.
        """
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._free or not self.is_growing)
            if not self._free:
                self._raise_failure()
                return None
            position = bisect.bisect_left(self._free, wanted, key=_nbytes)
            block = self._free.pop(min(position, len(self._free) - 1))
            block.allocation.num_lent += 1
            return block

    def give(self, block: HostBlock) -> None:
        """Take back a lent block."""
        with self._changed:
            block.allocation.num_lent -= 1
            bisect.insort(self._free, block, key=_nbytes)
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------- growing

    def _check_room(self, missing: int) -> None:
        limits = [(limit, "raise the limit") for limit in cgroup_limits()]
        if self._limit_bytes is not None:
            held = sum(allocation.tensor.numel() for allocation in self._allocations) + self._growing_bytes
            limits.append((HostLimit("host_memory_bytes", self._limit_bytes, held), _RAISE_OWN_LIMIT))
        for limit, remedy in limits:
            if missing > limit.room_bytes:
                raise DeviceError(
                    f"the offload of {self._device.name} needs {missing} bytes of host memory more, and {limit}; "
                    f"{remedy}, offload fewer tags, or release with meta() what need not come back"
                )

    def _grow(self, missing: int, num_trims: int) -> None:
        """Allocate ``missing`` bytes, and stop once the arena was trimmed more than ``num_trims`` times."""
        try:
            while missing:
                nbytes = min(missing, _ALLOCATION_BYTES)
                allocation = self._allocate(nbytes)
                if not self._add(allocation, num_trims):
                    self._free_allocation(allocation)
                    return
                missing -= nbytes
        except BaseException as error:  # raised by the next call that waits
            with self._changed:
                if self._num_trims == num_trims:
                    self._growing_bytes -= missing
                    self._failure = error
                    self._changed.notify_all()

    def _add(self, allocation: HostAllocation, num_trims: int) -> bool:
        with self._changed:
            if self._num_trims != num_trims:
                return False
            self._allocations.append(allocation)
            self._free.extend(HostBlock(part, allocation) for part in torch.split(allocation.tensor, BLOCK_BYTES))
            self._free.sort(key=_nbytes)
            self._growing_bytes -= allocation.tensor.numel()
            self._changed.notify_all()
            return True

    def _allocate(self, nbytes: int) -> HostAllocation:
        try:
            buffer = self._device.memory.host_alloc(nbytes)
            return HostAllocation(buffer.tensor, buffer)
        except DeviceError as error:
            try:
                allocation = HostAllocation(torch.empty(nbytes, dtype=torch.uint8), None)
            except (RuntimeError, MemoryError) as refused:
                raise DeviceError(
                    f"{nbytes} bytes of host memory for an offload could not be had: {refused}"
                ) from error
            lock_limit = lock_limit_bytes()
            _log.warning(
                "%d bytes of host memory could not be pinned (%s; the lock limit, ulimit -l, is %s): pageable memory "
                "is used, whose copies are several times slower",
                nbytes,
                error,
                "unlimited" if lock_limit is None else f"{lock_limit} bytes",
            )
            return allocation

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_nbytes = attrgetter("nbytes")
_arenas: dict[str, HostArena] = {}
_lock = threading.Lock()


def arena_of(device: Device) -> HostArena:
    """Return the arena of ``device`` in this process."""
    with _lock:
        return _arenas.setdefault(device.name, HostArena(device))


def reserve_host_memory(device: Device, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
    """Limit the host memory of a device's offloads, and allocate some in the background; None leaves that alone.

    Raises:
        DeviceError: there is not so much.
    """
    arena = arena_of(device)
    if host_memory_bytes is not None:
        arena.set_limit(host_memory_bytes)
    if reserve_host_bytes is not None:
        arena.reserve(reserve_host_bytes)
