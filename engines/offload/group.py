"""Groups of tensors, one for each tag of a worker, that leave the device and come back together.

Weights are parameters. Buffers stay: they are small, and many (rotary tables) could not be made again after a release.
A read of a freed storage is a segmentation fault, so the users of the tensors are guarded while these are away.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.device import Device
from rlcore.engines.offload.chunks import Chunk, host_bytes, release_blocks, whole
from rlcore.engines.offload.device_to_host import DeviceToHost
from rlcore.engines.offload.guards import Guard
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.offload.host_to_device import HostToDevice
from rlcore.engines.offload.storages import distinct_storages, freeable_storages
from rlcore.engines.offload.transfer import Transfer
from rlcore.types import OffloadReport

_NOTHING = OffloadReport(moved_bytes=0, freed_device_bytes=0, seconds=0.0, pinned=False, first_use=False)


def _no_guard(guard: Guard, state: str) -> None:
    """Guard nothing: nobody uses the tensors but by methods that the engine refuses while these are away."""


class OffloadGroup:
    """Tensors of one device that leave it and come back together.

    Args:
        device: the device of the tensors; tensors elsewhere stay where they are.
        tensors: lists the tensors of the group as they are now.
        guard: ``guard(guard, state)`` makes the users of the tensors raise while these are "offloaded" or "released".
        before_leaving: is called while the tensors are still there; who shared them with other processes revokes that.
    """

    def __init__(
        self,
        device: Device,
        tensors: Callable[[], Iterable[Tensor]],
        guard: Callable[[Guard, str], None] = _no_guard,
        *,
        before_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._tensors = tensors
        self._guard_users = guard
        self._before_leaving = before_leaving
        self._guard = Guard()
        self._chunks: deque[Chunk] = deque()
        self._is_away = False
        weakref.finalize(self, release_blocks, self._chunks, arena_of(device)).atexit = False

    # ---------------------------------------------------------------------------------------------- moves

    def onload(self) -> OffloadReport:
        """Bring the values back; after ``meta`` only the memory, whose values are undefined. No-op if not away."""
        return swap_groups([], [self])[0]

    def offload(self) -> OffloadReport:
        """Copy every distinct storage to the host and free it. No-op if away."""
        return swap_groups([self], [])[0]

    def meta(self) -> OffloadReport:
        """Free the storages and their host memory without a copy."""
        started = time.perf_counter()
        freed = 0
        if not self._is_away:
            self._before_leaving()
            storages = self._storages()
            freed = sum(storage.nbytes() for storage in storages)
            self._chunks.extend(Chunk(None, [part]) for part in whole(storages))
            for storage in storages:
                storage.resize_(0)
            if freed:
                self.device.memory.empty_cache()  # other processes take it
        release_blocks(self._chunks, arena_of(self.device))
        self._is_away = True
        self._guard.lift()
        self._guard_users(self._guard, "released")
        return OffloadReport(
            moved_bytes=0,
            freed_device_bytes=freed,
            seconds=time.perf_counter() - started,
            pinned=False,
            first_use=False,
        )

    def forget(self) -> None:
        """Forget what is away, because the tensors are about to be replaced or overwritten."""
        self.drop()
        self._is_away = False
        self._guard.lift()

    def drop(self) -> None:
        """Give up the values for good; the users of the tensors still raise."""
        release_blocks(self._chunks, arena_of(self.device))
        self._chunks.clear()

    # ------------------------------------------------------------------------------- as a part of a swap

    def to_host(self) -> DeviceToHost:
        """Guard the users of the tensors and plan the copy to the host."""
        self._before_leaving()
        ranges = whole(self._storages())
        self._guard_users(self._guard, "offloaded")
        return DeviceToHost(self._chunks, ranges)

    def to_device(self, *, few_segments: bool) -> HostToDevice:
        """Plan the copy to the device; see ``HostToDevice``."""
        return HostToDevice(self._chunks, few_segments=few_segments)

    def set_offloaded(self) -> None:
        """Record that the tensors have left."""
        self._is_away = True

    def cancel_offload(self) -> None:
        """Record that the tensors have stayed, after a failure."""
        self._guard.lift()

    def set_onloaded(self) -> None:
        """Record that the tensors are back."""
        self._is_away = False
        self._guard.lift()

    @property
    def is_away(self) -> bool:
        return self._is_away

    # --------------------------------------------------------------------------------------------- report

    @property
    def host_bytes(self) -> int:
        """The bytes of the arena that the group occupies now."""
        return host_bytes(self._chunks)

    @property
    def device_bytes(self) -> int:
        storages = distinct_storages(self._tensors())
        return sum(storage.nbytes() for storage in storages if storage.device == self.device.torch_device)

    def _storages(self) -> list[torch.UntypedStorage]:
        return freeable_storages(self._tensors(), self.device)


def swap_groups(out: Sequence[OffloadGroup], in_: Sequence[OffloadGroup]) -> list[OffloadReport]:
    """Offload all of ``out`` while all of ``in_`` come back, on one device; return a report of each, in this order.

    Groups that are already where they should be do nothing. After an error everything is where it was.

    Raises:
        DeviceError: there is too little host or device memory.
        StateError, UnsupportedError: a storage cannot be freed.
    """
    if not out and not in_:
        return []
    swap = GroupSwap(out, in_, few_segments=not out)
    try:
        swap.transfer.run()
    except BaseException:
        swap.cancel()
        raise
    return swap.finish()


class GroupSwap:
    """Groups of one device in this process that change places; their users are guarded until ``finish``."""

    def __init__(self, out: Sequence[OffloadGroup], in_: Sequence[OffloadGroup], *, few_segments: bool = False) -> None:
        """Plan the copies; nothing has moved yet. Raises as ``swap_groups`` does for storages that cannot be freed.

        Args:
            few_segments: see ``HostToDevice``.
        """
        self._all = [*out, *in_]
        self._leaving = [group for group in out if not group.is_away]
        self._returning = [group for group in in_ if group.is_away]
        device = self._all[0].device
        try:
            to_host = [group.to_host() for group in self._leaving]
        except BaseException:
            self.cancel()
            raise
        few_segments = few_segments and not device.spec.is_host
        to_device = [group.to_device(few_segments=few_segments) for group in self._returning]
        self.transfer = Transfer(device, arena_of(device), to_host, to_device)

    def finish(self) -> list[OffloadReport]:
        """Record that everything has moved; return a report of each group, those of ``out`` first."""
        for group in self._leaving:
            group.set_offloaded()
        for group in self._returning:
            group.set_onloaded()
        moved = dict(zip(self._leaving + self._returning, self.transfer.reports(), strict=True))
        return [moved.get(group, _NOTHING) for group in self._all]

    def cancel(self) -> None:
        """Record that everything is where it was."""
        for group in self._leaving:
            group.cancel_offload()


class GradientGroup(OffloadGroup):
    """The gradients of a module. While away they are not ``parameter.grad``: autograd would add to a freed storage."""

    def __init__(self, device: Device, module: nn.Module, guard: Callable[[Guard, str], None] = _no_guard) -> None:
        super().__init__(device, lambda: (grad for _, grad in self._held()), guard)
        self._module = module
        self._away: list[tuple[nn.Parameter, Tensor]] = []

    def _held(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, p.grad) for p in self._module.parameters() if p.grad is not None]

    def set_offloaded(self) -> None:
        super().set_offloaded()
        self._away = self._held()
        for parameter, _ in self._away:
            parameter.grad = None

    def set_onloaded(self) -> None:
        super().set_onloaded()
        for parameter, grad in self._away:
            meanwhile, parameter.grad = parameter.grad, grad
            if meanwhile is not None:  # a backward pass has run
                parameter.grad += meanwhile
        self._away = []

    def forget(self) -> None:
        """Drop the gradients, of weights that are about to be replaced. What was away is onloaded all the same."""
        for parameter, _ in self._held():
            parameter.grad = None
        self._away = []

    def meta(self) -> OffloadReport:
        """Drop the gradients, and give what they and activations have left in torch's cache to other processes."""
        held = self._held()
        report = super().meta()
        if not held:
            self.device.memory.empty_cache()
        for parameter, _ in held:
            parameter.grad = None
        self._away = []
        self.drop()  # gradients start from none, not from undefined memory
        return report


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yield every tensor of every optimizer's state."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
