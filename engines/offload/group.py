"""One tag of one worker: tensors that can leave the device and come back, guarded while they are away.

Weights are parameters. Buffers stay: they are small, and many (rotary tables) could not be made again after a release.
Touching a freed storage is a segmentation fault, which is why the users of what is away are guarded.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.device import Device
from rlcore.engines.offload.chunks import Arrival, Cargo, Departure, Parcel, whole
from rlcore.engines.offload.copy import Transfer
from rlcore.engines.offload.guards import Guard
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.offload.storages import distinct_storages, freeable_storages
from rlcore.errors import InvalidInputError
from rlcore.registry import get_device
from rlcore.types import OffloadReport

_NOTHING = OffloadReport(moved_bytes=0, freed_device_bytes=0, seconds=0.0, pinned=False, first_use=False)


class Resident:
    """``tensors()`` lists what the tag holds now; ``guard(guard, state)`` guards its users while it is away.

    ``before_leaving()`` is called while they are still there: whoever shared them takes that back.
    """

    def __init__(
        self,
        device: Device,
        tensors: Callable[[], Iterable[Tensor]],
        guard: Callable[[Guard, str], None],
        *,
        before_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._tensors = tensors
        self._guard_users = guard
        self._before_leaving = before_leaving
        self._guard = Guard()
        self._cargo = Cargo()
        self._is_away = False
        weakref.finalize(self, self._cargo.release, arena_of(device)).atexit = False

    # ---------------------------------------------------------------------------------------------- moves

    def onload(self) -> OffloadReport:
        """Bring back what left; after ``meta`` only the room, its values undefined. Nothing if it is there."""
        return exchange([], [self])[0]

    def offload(self) -> OffloadReport:
        """Copy every distinct storage to the host and free it. Nothing if it is away."""
        return exchange([self], [])[0]

    def meta(self) -> OffloadReport:
        """Free the storages and their host memory, without copying."""
        started = time.perf_counter()
        freed = 0
        if not self._is_away:
            self._before_leaving()
            storages = self._storages()
            freed = sum(storage.nbytes() for storage in storages)
            self._cargo.parcels.extend(Parcel(None, [part]) for part in whole(storages))
            for storage in storages:
                storage.resize_(0)
            if freed:
                self.device.memory.empty_cache()  # other processes are to have it
        self._cargo.release(arena_of(self.device))
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
        """Its tensors are about to be replaced or overwritten: nothing is away any more."""
        self.drop()
        self._is_away = False
        self._guard.lift()

    def drop(self) -> None:
        """Nothing is to be brought back; whoever uses what is away is still refused."""
        self._cargo.release(arena_of(self.device))
        self._cargo.parcels.clear()

    # ------------------------------------------------------------------------------------------ both at once

    def departure(self) -> Departure:
        """Guard the tensors and let them leave."""
        self._before_leaving()
        ranges = whole(self._storages())
        self._guard_users(self._guard, "offloaded")
        return Departure(self._cargo, ranges)

    def arrival(self, *, gathers: bool) -> Arrival:
        return Arrival(self._cargo, gathers=gathers)

    def has_left(self) -> None:
        self._is_away = True

    def has_stayed(self) -> None:
        """A departure failed."""
        self._guard.lift()

    def has_arrived(self) -> None:
        self._is_away = False
        self._guard.lift()

    @property
    def is_away(self) -> bool:
        return self._is_away

    # --------------------------------------------------------------------------------------------- report

    @property
    def host_bytes(self) -> int:
        """Of the arena, which this tag has now."""
        return self._cargo.host_bytes

    @property
    def device_bytes(self) -> int:
        storages = distinct_storages(self._tensors())
        return sum(storage.nbytes() for storage in storages if storage.device == self.device.torch_device)

    def _storages(self) -> list[torch.UntypedStorage]:
        return freeable_storages(self._tensors(), self.device)


def exchange(out: Sequence[Resident], in_: Sequence[Resident]) -> list[OffloadReport]:
    """All of ``out`` leaves while all of ``in_`` comes back, on one device; a report of each, in this order.

    Those that are there already do nothing. After an error everything is where it was.

    Raises:
        DeviceError: host or device memory does not do.
        StateError, UnsupportedError: a storage cannot be freed.
    """
    if not out and not in_:
        return []
    moves = Exchange(out, in_, gathers=not out)
    try:
        moves.transfer.run()
    except BaseException:
        moves.has_gone_back()
        raise
    return moves.has_ended()


class Exchange:
    """Residents of one device in this process, on their way; its users are guarded until it has ended."""

    def __init__(self, out: Sequence[Resident], in_: Sequence[Resident], *, gathers: bool = False) -> None:
        """Nothing has moved yet; raises what ``exchange`` does of storages that cannot be freed.

        Args:
            gathers: see ``Arrival``.
        """
        self._all = [*out, *in_]
        self._leaving = [resident for resident in out if not resident.is_away]
        self._arriving = [resident for resident in in_ if resident.is_away]
        device = self._all[0].device
        try:
            departures = [resident.departure() for resident in self._leaving]
        except BaseException:
            self.has_gone_back()
            raise
        arrivals = [resident.arrival(gathers=gathers and not device.spec.is_host) for resident in self._arriving]
        self.transfer = Transfer(device, arena_of(device), departures, arrivals)

    def has_ended(self) -> list[OffloadReport]:
        """Of each resident, those of ``out`` first."""
        for resident in self._leaving:
            resident.has_left()
        for resident in self._arriving:
            resident.has_arrived()
        moved = dict(zip(self._leaving + self._arriving, self.transfer.reports(), strict=True))
        return [moved.get(resident, _NOTHING) for resident in self._all]

    def has_gone_back(self) -> None:
        for resident in self._leaving:
            resident.has_stayed()


class GradResident(Resident):
    """Gradients. While away they are no longer ``parameter.grad``: autograd would add to a freed storage."""

    def __init__(self, device: Device, module: nn.Module, guard: Callable[[Guard, str], None]) -> None:
        super().__init__(device, lambda: (grad for _, grad in self._held()), guard)
        self._module = module
        self._away: list[tuple[nn.Parameter, Tensor]] = []

    def _held(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, p.grad) for p in self._module.parameters() if p.grad is not None]

    def has_left(self) -> None:
        super().has_left()
        self._away = self._held()
        for parameter, _ in self._away:
            parameter.grad = None

    def has_arrived(self) -> None:
        super().has_arrived()
        for parameter, grad in self._away:
            meanwhile, parameter.grad = parameter.grad, grad
            if meanwhile is not None:  # a backward pass has run
                parameter.grad += meanwhile
        self._away = []

    def meta(self) -> OffloadReport:
        held = self._held()
        report = super().meta()
        for parameter, _ in held:
            parameter.grad = None
        self._away = []
        self.drop()  # gradients start from none, not from undefined memory
        return report


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Every tensor of every optimizer's state."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@contextlib.contextmanager
def offloaded(module: nn.Module, *optimizers: Optimizer) -> Iterator[OffloadReport]:
    """Keep a module's weights and its optimizers' states in host memory inside the ``with`` block.

    Needs no engine. Using the module inside, or any optimizer of its parameters, raises ``StateError``; its tensors
    themselves must not be touched. The host memory is kept for the next time.

    Raises:
        InvalidInputError: a module without parameters, or something else than a module and optimizers.
    """
    _check_offloadable(module, optimizers)
    device = get_device(next(module.parameters()).device)

    def tensors() -> Iterator[Tensor]:
        yield from module.parameters()
        yield from optimizer_tensors(optimizers)

    def guard(up: Guard, state: str) -> None:
        message = f"the tensors of this {type(module).__name__} are {state} inside `with offloaded(...)`"
        up.guard_module(module, message)
        up.guard_optimizers(optimizers, message)

    resident = Resident(device, tensors, guard)
    report = resident.offload()
    try:
        yield report
    finally:
        resident.onload()


def _check_offloadable(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidInputError(f"offloaded() takes a torch.nn.Module first, got {type(module).__name__}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidInputError(
                f"offloaded() takes torch.optim.Optimizer after the module, got {type(optimizer).__name__}; "
                "give each optimizer by itself, and leave schedulers out"
            )
    if next(module.parameters(), None) is None:
        raise InvalidInputError(f"offloaded() takes a module with parameters; this {type(module).__name__} has none")
