"""What the workers of every executor share: a device, and parts that can leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypedDict

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.arena import arena_of
from rlcore.engines.offload.resident import Resident, exchange
from rlcore.engines.residency import Move
from rlcore.types import MemoryInfo, MemoryStats, OffloadReport

_BOTH_WAYS = (Move.OFFLOAD, Move.ONLOAD)


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
    drives_replica: ClassVar[bool] = False
    """One worker drives all ``tensor_parallel_size`` devices of a replica; else each worker has one device."""

    def __init__(self, context: WorkerContext) -> None:
        self.device = context.device
        self.emit = context.emit
        self._residents: dict[str, Resident] = {}

    def onload(self, tag: str) -> OffloadReport:
        return self._residents[tag].onload()

    def offload(self, tag: str) -> OffloadReport:
        return self._residents[tag].offload()

    def meta(self, tag: str) -> OffloadReport:
        return self._residents[tag].meta()

    def swap(self, plan: Sequence[tuple[int, Move, str]], *workers: Worker) -> list[OffloadReport]:
        """Tags of workers on this device leave while others come back; one report a step, in the order of ``plan``.

        Args:
            plan: (position in ``workers``, OFFLOAD or ONLOAD, tag).
        """
        chosen = [workers[position]._residents[tag] for position, _, tag in plan]
        out, in_ = ([one for one, step in zip(chosen, plan, strict=True) if step[1] is move] for move in _BOTH_WAYS)
        reports = dict(zip([*out, *in_], exchange(out, in_), strict=True))
        return [reports[resident] for resident in chosen]

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
