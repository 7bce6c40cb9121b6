"""The host processor as a device: the same verbs, measured on process and machine memory."""

from __future__ import annotations

import os
import platform
import uuid
from pathlib import Path
from typing import final

import torch

from rlcore.devices.generic import GenericTorchDevice, Memory
from rlcore.types import DeviceProperties, MemoryInfo, MemoryStats, Probe


def _kib_field(path: str, field: str) -> int:
    """Bytes in a "Field:  123 kB" line of a /proc file."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no field {field!r}")


class CpuMemory(Memory):
    """The resident set of this process stands for what an allocator would hold."""

    def info(self) -> MemoryInfo:
        return MemoryInfo(_kib_field("/proc/meminfo", "MemAvailable"), _kib_field("/proc/meminfo", "MemTotal"))

    def stats(self) -> MemoryStats:
        resident = _kib_field("/proc/self/status", "VmRSS")
        return MemoryStats(
            allocated_bytes=_kib_field("/proc/self/status", "RssAnon"),
            reserved_bytes=resident,
            peak_allocated_bytes=_kib_field("/proc/self/status", "VmHWM"),
        )

    def reset_peak(self) -> None:
        # "5" resets VmHWM to the present resident set: proc(5), clear_refs.
        Path("/proc/self/clear_refs").write_text("5")

    def empty_cache(self) -> None:
        """glibc keeps freed pages; hand them back."""
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)

    @property
    def can_pin(self) -> bool:
        return False


@final
class CpuDevice(GenericTorchDevice):
    """Host memory and cores. Every index is the same processor."""

    def _make_memory(self) -> Memory:
        return CpuMemory()

    @staticmethod
    def probe() -> Probe:
        return Probe(1)

    def properties(self) -> DeviceProperties:
        return DeviceProperties(
            name=platform.processor() or platform.machine(),
            uuid=str(uuid.UUID(int=uuid.getnode())),
            total_bytes=self.memory.info().total_bytes,
            capability=torch.backends.cpu.get_cpu_capability(),
            cores=len(os.sched_getaffinity(0)),
        )

    def synchronize(self) -> None:
        """Operators on the CPU return when they are done."""

    def _generator(self) -> torch.Generator:
        return torch.default_generator
