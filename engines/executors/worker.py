"""The base of every executor's workers: a device, and groups of tensors that can leave it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from rlcore import held_memory
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.group import GroupSwap, OffloadGroup, swap_groups
from rlcore.engines.offload.host_arena import arena_of, reserve_host_memory
from rlcore.engines.offload.transfer import Grant, Progress
from rlcore.engines.residency import Move
from rlcore.planned import PlannedDevice, as_planned
from rlcore.spans import boot_id
from rlcore.types import MemoryInfo, MemoryStats, OffloadReport

_BOTH_WAYS = (Move.OFFLOAD, Move.ONLOAD)
SwapPlan = Sequence[tuple[int, Move, str]]
"""For each tag that moves: the position of its worker among those that come with the plan, OFFLOAD or ONLOAD, tag."""


class TagBytes(TypedDict):
    device_bytes: int
    host_bytes: int


class MemoryReport(TypedDict):
    device: str
    tags: dict[str, TagBytes]
    stats: MemoryStats
    info: MemoryInfo


class Worker:
    """Base of executors' worker classes; ``build`` of a subclass fills ``offload_groups`` with one entry a tag."""

    runs_on_many_devices: ClassVar[bool] = False
    """An engine may have several workers, which share one set of weights."""
    owns_process: ClassVar[bool] = False
    """Each worker lives in a process of its own, apart from other engines' workers on its device."""
    joins_torchrun: ClassVar[bool] = False
    """The process that a worker owns may be a rank of torchrun, in which a trainer's worker lives too."""
    runs_user_code: ClassVar[bool] = False
    """A module of the user's is sent to the workers."""
    drives_replica: ClassVar[bool] = False
    """One worker drives all ``tensor_parallel_size`` devices of a replica; else each worker has one device."""
    can_swap: ClassVar[bool] = True
    """Its tags are ``offload_groups``, which ``rlcore.swap`` moves both ways at once."""
    options_class: ClassVar[type[Any] | None] = None
    """A dataclass of the options of ``build`` that checks their values; None: the keyword arguments of ``build``."""

    @classmethod
    def check(cls, path: Path, options: Mapping[str, object], python: str | os.PathLike[str] | None) -> None:
        """Raise what ``build(path, **options)`` would, as far as the user's process can see.

        Called there before a worker starts, which takes seconds. ``build`` does not count on it: ``restart`` goes
        without, and so does a program that starts workers itself.

        Args:
            python: as ``Engine.build`` was given it; None where the worker has the user's packages.
        """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.device = context.device
        self.emit = context.emit
        self.offload_groups: dict[str, OffloadGroup] = {}
        """The tensors of each tag."""
        self.sync_ends: list[Any] = []
        """This worker's ends of weight syncs: its ``Receiver``, or of a trainer its ``Sender``."""
        self._swap: GroupSwap | None = None
        self._earlier_host_limit = arena_of(self.device).limit_bytes
        held_memory.report(self, Worker._held)

    def onload(self, tag: str) -> OffloadReport:
        return self.offload_groups[tag].onload()

    def offload(self, tag: str) -> OffloadReport:
        return self.offload_groups[tag].offload()

    def meta(self, tag: str) -> OffloadReport:
        return self.offload_groups[tag].meta()

    # Swaps: one worker moves tags of its own and of other workers, all of one device and of one process. ``swap`` does
    # everything in one call. A swap that spans several processes goes in rounds, in each of which every one of them
    # moves a part: ``begin_swap``, then ``swap_step`` until nothing is left to move, then ``end_swap``.

    def swap(self, plan: SwapPlan, *workers: Worker) -> list[OffloadReport]:
        """Move all tags of ``plan``, both ways at once; return one report a tag, in the order of ``plan``.

        Args:
            workers: those that ``plan`` names by their position.
        """
        out, in_ = (_groups_that(move, plan, workers) for move in _BOTH_WAYS)
        return _in_order_of(plan, swap_groups(out, in_))

    def begin_swap(self, plan: SwapPlan, *workers: Worker) -> Progress:
        """Check and reserve what a swap in rounds needs. Raises what ``swap`` raises before anything moves."""
        begun = GroupSwap(*(_groups_that(move, plan, workers) for move in _BOTH_WAYS))
        try:
            begun.transfer.begin()
        except BaseException:
            begun.cancel()
            raise
        self._swap = begun
        return begun.transfer.progress

    def swap_step(self, grant: Grant) -> Progress:
        """Move some blocks, within the device memory of ``grant``; see ``Transfer.step``."""
        assert self._swap is not None
        return self._swap.transfer.step(grant)

    def reverse_swap(self) -> Progress:
        """Turn the swap around, at any moment after ``begin_swap``: the steps that follow bring everything back."""
        if self._swap is None:  # it could not begin
            return Progress(0, 0, has_device_to_host=False, has_host_to_device=False)
        self._swap.transfer = self._swap.transfer.reversed()
        return self._swap.transfer.progress

    def end_swap(self, plan: SwapPlan, *, was_reversed: bool) -> list[OffloadReport]:
        """Return one report a tag, in the order of ``plan``; none after ``reverse_swap``."""
        ended, self._swap = self._swap, None
        if ended is None:
            return []
        if was_reversed:
            ended.cancel()
            return []
        return _in_order_of(plan, ended.finish())

    def reserve_host_memory(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        """Limit the host memory of offloads, and allocate some in the background; None leaves that alone.

        Raises:
            DeviceError: there is not so much.
        """
        reserve_host_memory(self.device, host_memory_bytes, reserve_host_bytes)

    def restore_host_limit(self) -> None:
        """The limit of offloads is what it was before this worker."""
        arena_of(self.device).set_limit(self._earlier_host_limit)

    def clock(self) -> tuple[str, int]:
        """Return the name of this start of the host's kernel, and its CLOCK_MONOTONIC in nanoseconds."""
        return boot_id(), time.monotonic_ns()

    def memory_report(self) -> MemoryReport:
        tags: dict[str, TagBytes] = {
            tag: {"device_bytes": group.device_bytes, "host_bytes": group.host_bytes}
            for tag, group in self.offload_groups.items()
        }
        memory = self.device.memory
        return {"device": self.device.name, "tags": tags, "stats": memory.stats(), "info": memory.info()}

    def planned_device(self) -> PlannedDevice:
        """Return the device's facts for a plan of memory."""
        return as_planned(self.device)

    def _held(self) -> dict[str, int]:
        """Return the bytes that its tags have on the device. Those on the host are part of the arena's."""
        name = f"of {self.context.engine} on {self.device.name}"
        return {f"{tag} {name}": group.device_bytes for tag, group in self.offload_groups.items()}

    def close(self) -> None:
        """Drop everything and give the memory back to the device, and to the host what no other worker has there."""
        for end in self.sync_ends:
            end.close()
        for group in self.offload_groups.values():
            group.drop()
        self.__dict__ = {"device": self.device}
        arena_of(self.device).trim()
        self.device.memory.empty_cache()


def _groups_that(move: Move, plan: SwapPlan, workers: Sequence[Worker]) -> list[OffloadGroup]:
    return [workers[position].offload_groups[tag] for position, planned, tag in plan if planned is move]


def _in_order_of(plan: SwapPlan, reports: list[OffloadReport]) -> list[OffloadReport]:
    """Sort the reports of tags that leave, followed by those of tags that come back, in the order of ``plan``."""
    by_move = sorted(range(len(plan)), key=lambda number: _BOTH_WAYS.index(plan[number][1]))
    by_number = dict(zip(by_move, reports, strict=True))
    return [by_number[number] for number in range(len(plan))]
