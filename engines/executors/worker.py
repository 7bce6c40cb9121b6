"""What the workers of every executor share: a device, and parts that can leave it."""

from __future__ import annotations

from typing import ClassVar, TypedDict

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.arena import arena_of
from rlcore.engines.offload.resident import Resident
from rlcore.types import MemoryInfo, MemoryStats, OffloadReport


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
