"""Host memory that everything offloaded from one device of this process shares.

Slabs are allocated in the exact size that is missing, touched and registered once, and kept: what one engine brings
back leaves room for the next. A slab is handed out in blocks, the unit in which data moves.
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

from rlcore.device import Device
from rlcore.engines.offload.host_limits import HostLimit, cgroup_limits, lock_limit_bytes
from rlcore.errors import DeviceError, InvalidInputError, StateError

_log = logging.getLogger(__name__)

BLOCK_BYTES = 128 << 20
"""About 2.5 ms of a link of 50 GB/s: large beside the cost of a call, small beside the memory of a device."""
_SLAB_BYTES = 1 << 30
"""Enough for all threads that touch its pages; a registration each, of which a batch of copies looks at all."""
_ALIGNMENT = 64
"""Of tensors within a block, a cache line; blocks are multiples of it."""
_RAISE_OWN_LIMIT = "raise the limit (set by the last build() in this process that gave one; pass host_memory_bytes=)"


@dataclass(eq=False, slots=True)
class Slab:
    tensor: Tensor
    """[nbytes] uint8."""
    buffer: Any
    """The ``HostBuffer``; None of pageable memory."""
    num_lent: int = 0

    @property
    def is_pinned(self) -> bool:
        return self.buffer is not None and self.buffer.is_pinned


@dataclass(eq=False, slots=True)
class Block:
    """A part of a slab, lent by ``Arena.take`` until ``Arena.give``."""

    tensor: Tensor
    """[nbytes] uint8."""
    slab: Slab
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.tensor.numel()


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """The host memory of one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slabs: list[Slab] = []
        self._free: list[Block] = []  # by size
        self._limit_bytes: int | None = None
        self._growing_bytes = 0
        self._num_trims = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    # ----------------------------------------------------------------------------------------------- size

    @property
    def total_bytes(self) -> int:
        with self._changed:
            return sum(slab.tensor.numel() for slab in self._slabs)

    @property
    def free_bytes(self) -> int:
        with self._changed:
            return sum(block.nbytes for block in self._free)

    @property
    def is_growing(self) -> bool:
        return self._growing_bytes > 0

    @property
    def limit_bytes(self) -> int | None:
        """What ``set_limit`` said."""
        return self._limit_bytes

    def set_limit(self, host_memory_bytes: int | None) -> None:
        """The most bytes to hold at any time; None leaves it to the limits of the process."""
        if host_memory_bytes is not None and (type(host_memory_bytes) is not int or host_memory_bytes < 1):
            raise InvalidInputError(
                f"host_memory_bytes must be a whole number of at least 1 or None, got {host_memory_bytes!r}"
            )
        self._limit_bytes = host_memory_bytes

    def reserve(self, nbytes: int) -> bool:
        """Have ``nbytes`` free soon: what is missing is allocated in the background. True if something is missing.

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
        """Until everything reserved is there; raises what its allocation raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_growing)
            self._raise_failure()

    def trim(self) -> int:
        """Give the slabs of which nothing is lent back to the host; their bytes.

        A slab that is still being allocated goes back as soon as it is there: ``trim`` does not wait for it, as the
        garbage collector may call it in the very thread that allocates.
        """
        with self._changed:
            self._num_trims += 1
            self._growing_bytes = 0
            self._changed.notify_all()
            unused = [slab for slab in self._slabs if not slab.num_lent]
            self._slabs = [slab for slab in self._slabs if slab.num_lent]
            self._free = [block for block in self._free if block.slab.num_lent]
        freed = sum(slab.tensor.numel() for slab in unused)
        for slab in unused:
            self._give_back(slab)
        return freed

    def _give_back(self, slab: Slab) -> None:
        buffer = slab.buffer
        del slab.tensor, slab.buffer
        if buffer is not None:
            with contextlib.suppress(StateError):  # a traceback still holds a view: unmapped when that goes
                self._device.memory.host_free(buffer)

    # --------------------------------------------------------------------------------------------- lending

    def take(self, wanted: int, *, waits: bool) -> Block | None:
        """A free block, the smallest that holds ``wanted`` bytes, else the largest.

        None: nothing is free, nor, with ``waits``, will be before blocks are given back. Raises what an allocation in
        the background raised.
        """
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._free or not self.is_growing)
            if not self._free:
                self._raise_failure()
                return None
            position = bisect.bisect_left(self._free, wanted, key=_nbytes)
            block = self._free.pop(min(position, len(self._free) - 1))
            block.slab.num_lent += 1
            return block

    def give(self, block: Block) -> None:
        with self._changed:
            block.slab.num_lent -= 1
            bisect.insort(self._free, block, key=_nbytes)
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------- growing

    def _check_room(self, missing: int) -> None:
        limits = [(limit, "raise the limit") for limit in cgroup_limits()]
        if self._limit_bytes is not None:
            held = sum(slab.tensor.numel() for slab in self._slabs) + self._growing_bytes
            limits.append((HostLimit("host_memory_bytes", self._limit_bytes, held), _RAISE_OWN_LIMIT))
        for limit, remedy in limits:
            if missing > limit.room_bytes:
                raise DeviceError(
                    f"the offload of {self._device.name} needs {missing} bytes of host memory more, and {limit}; "
                    f"{remedy}, offload fewer tags, or release with meta() what need not come back"
                )

    def _grow(self, missing: int, num_trims: int) -> None:
        """Allocate ``missing`` bytes; none after the arena was trimmed once more than ``num_trims`` times."""
        try:
            while missing:
                nbytes = min(missing, _SLAB_BYTES)
                slab = self._new_slab(nbytes)
                if not self._has_taken(slab, num_trims):
                    self._give_back(slab)
                    return
                missing -= nbytes
        except BaseException as error:  # taken up by whoever waits
            with self._changed:
                if self._num_trims == num_trims:
                    self._growing_bytes -= missing
                    self._failure = error
                    self._changed.notify_all()

    def _has_taken(self, slab: Slab, num_trims: int) -> bool:
        with self._changed:
            if self._num_trims != num_trims:
                return False
            self._slabs.append(slab)
            self._free.extend(Block(part, slab) for part in torch.split(slab.tensor, BLOCK_BYTES))
            self._free.sort(key=_nbytes)
            self._growing_bytes -= slab.tensor.numel()
            self._changed.notify_all()
            return True

    def _new_slab(self, nbytes: int) -> Slab:
        try:
            buffer = self._device.memory.host_alloc(nbytes)
            return Slab(buffer.tensor, buffer)
        except DeviceError as error:
            try:
                slab = Slab(torch.empty(nbytes, dtype=torch.uint8), None)
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
            return slab

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_nbytes = attrgetter("nbytes")
_arenas: dict[str, Arena] = {}
_lock = threading.Lock()


def arena_of(device: Device) -> Arena:
    """The one of this process and ``device``."""
    with _lock:
        return _arenas.setdefault(device.name, Arena(device))
