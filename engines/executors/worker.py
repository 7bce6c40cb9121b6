"""What the workers of every executor share: a device, and parts that can leave it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.copy import Grant, Progress
from rlcore.engines.offload.group import Exchange, Resident, exchange
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.residency import Move
from rlcore.types import MemoryInfo, MemoryStats, OffloadReport

_BOTH_WAYS = (Move.OFFLOAD, Move.ONLOAD)
Plan = Sequence[tuple[int, Move, str]]
"""Of a swap: position in the workers that come with it, OFFLOAD or ONLOAD, tag."""


class TagBytes(TypedDict):
    device_bytes: int
    host_bytes: int


class MemoryReport(TypedDict):
    device: str
    tags: dict[str, TagBytes]
    stats: MemoryStats
    info: MemoryInfo


class Worker:
    """Base of executors' worker classes; ``build`` of a subclass fills ``_residents`` with one entry a tag."""

    runs_on_many_devices: ClassVar[bool] = False
    """Workers of one engine share one set of weights."""
    owns_process: ClassVar[bool] = False
    """Each worker lives in a process of its own, apart from other engines' workers on its device."""
    joins_torchrun: ClassVar[bool] = False
    """Where it owns its process, that may be a rank which torchrun started, which has a trainer's worker too."""
    runs_user_code: ClassVar[bool] = False
    """A module of the user's is sent to the workers."""
    drives_replica: ClassVar[bool] = False
    """One worker drives all ``tensor_parallel_size`` devices of a replica; else each worker has one device."""
    options_class: ClassVar[type[Any] | None] = None
    """A dataclass of the options of ``build`` that checks their values; None: the keyword arguments of ``build``."""

    @classmethod
    def check(cls, path: Path, options: Mapping[str, Any], python: str | os.PathLike[str] | None) -> None:
        """Raise what ``build(path, **options)`` would, as far as the user's process can see.

        Called there before a worker starts, which takes seconds. ``build`` does not count on it: ``restart`` goes
        without, and so does a program that starts workers itself.

        Args:
            python: as ``Engine.build`` was given it; None where the worker has the user's packages.
        """

    def __init__(self, context: WorkerContext) -> None:
        self.device = context.device
        self.emit = context.emit
        self._residents: dict[str, Resident] = {}
        self._exchange: Exchange | None = None
        self._earlier_host_limit = arena_of(self.device).limit_bytes

    def onload(self, tag: str) -> OffloadReport:
        return self._residents[tag].onload()

    def offload(self, tag: str) -> OffloadReport:
        return self._residents[tag].offload()

    def meta(self, tag: str) -> OffloadReport:
        return self._residents[tag].meta()

    def swap(self, plan: Plan, *workers: Worker) -> list[OffloadReport]:
        """Tags of workers on this device leave while others come back; one report a step, in the order of ``plan``."""
        out, in_ = (_residents(plan, workers, move) for move in _BOTH_WAYS)
        return _in_order_of(plan, exchange(out, in_))

    # What ``swap`` does, in turns with the workers of other processes on this device.

    def begin_turns(self, plan: Plan, *workers: Worker) -> Progress:
        """Raises what ``swap`` does before anything moves."""
        begun = Exchange(*(_residents(plan, workers, move) for move in _BOTH_WAYS))
        try:
            begun.transfer.begin()
        except BaseException:
            begun.has_gone_back()
            raise
        self._exchange = begun
        return begun.transfer.progress

    def take_turn(self, grant: Grant) -> Progress:
        """See ``Transfer.turn``."""
        assert self._exchange is not None
        return self._exchange.transfer.turn(grant)

    def turn_back(self) -> Progress:
        """The turns that follow bring everything back to where it was."""
        if self._exchange is None:  # it could not begin
            return Progress(0, 0, is_leaving=False, is_arriving=False)
        self._exchange.transfer = self._exchange.transfer.backwards()
        return self._exchange.transfer.progress

    def end_turns(self, plan: Plan, *, was_reversed: bool) -> list[OffloadReport]:
        """One report a step; none after ``turn_back``."""
        ended, self._exchange = self._exchange, None
        if ended is None:
            return []
        if was_reversed:
            ended.has_gone_back()
            return []
        return _in_order_of(plan, ended.has_ended())

    def reserve_host_memory(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        """Limit the host memory of offloads, and allocate some in the background; None leaves that alone.

        Raises:
            DeviceError: there is not so much.
        """
        arena = arena_of(self.device)
        if host_memory_bytes is not None:
            arena.set_limit(host_memory_bytes)
        if reserve_host_bytes is not None:
            arena.reserve(reserve_host_bytes)

    def restore_host_limit(self) -> None:
        """The limit of offloads is what it was before this worker."""
        arena_of(self.device).set_limit(self._earlier_host_limit)

    def memory_report(self) -> MemoryReport:
        tags: dict[str, TagBytes] = {
            tag: {"device_bytes": resident.device_bytes, "host_bytes": resident.host_bytes}
            for tag, resident in self._residents.items()
        }
        memory = self.device.memory
        return {"device": self.device.name, "tags": tags, "stats": memory.stats(), "info": memory.info()}

    def close(self) -> None:
        """Drop everything and give the memory back to the device, and to the host what no other worker has there."""
        for resident in self._residents.values():
            resident.drop()
        self.__dict__ = {"device": self.device}
        arena_of(self.device).trim()
        self.device.memory.empty_cache()


def _residents(plan: Plan, workers: Sequence[Worker], wanted: Move) -> list[Resident]:
    return [workers[position]._residents[tag] for position, move, tag in plan if move is wanted]


def _in_order_of(plan: Plan, reports: list[OffloadReport]) -> list[OffloadReport]:
    """``reports`` are of what leaves, then of what comes back."""
    steps = sorted(range(len(plan)), key=lambda number: _BOTH_WAYS.index(plan[number][1]))
    by_step = dict(zip(steps, reports, strict=True))
    return [by_step[number] for number in range(len(plan))]
