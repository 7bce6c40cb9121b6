"""The host processor as a device: the same members, over the memory of the process and the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import ClassVar, final

import torch

from rlcore.devices.cpu.sharing import CpuSharing
from rlcore.devices.cpu.streams import CpuStreams
from rlcore.devices.generic import GenericTorchDevice
from rlcore.devices.host_memory import HostBuffer, check_nbytes, map_pages
from rlcore.devices.ipc.sharing import Sharing
from rlcore.devices.memory import TorchMemory
from rlcore.devices.streams import TorchStreams
from rlcore.errors import UnsupportedError
from rlcore.types import Capability, DeviceProperties, DeviceSpec, MemoryInfo, MemoryStats, Probe


def _bytes_of(path: str, *fields: str) -> list[int]:
    """Return bytes from the "Field:  123 kB" lines of a /proc file, all read at once."""
    if not Path(path).exists():
        raise UnsupportedError("reading memory figures of the cpu device", f"they are read from {path} of Linux")
    lines = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    if missing := [field for field in fields if field not in lines]:
        raise RuntimeError(f"{path} has no field {', '.join(map(repr, missing))}")
    return [int(lines[field].split()[0]) * 1024 for field in fields]


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # Arm's /proc/cpuinfo has no model name


class CpuMemory(TorchMemory):
    """Host memory; the resident set of this process takes the place of an allocator's memory."""

    sharing_class: ClassVar[type[Sharing] | None] = CpuSharing

    def limits(self) -> dict[str, Capability]:
        limits = super().limits()
        del limits["host_alloc"], limits["copy_batch"]  # the CPU copies at the same speed from any memory
        return limits

    def info(self) -> MemoryInfo:
        free, total = _bytes_of("/proc/meminfo", "MemAvailable", "MemTotal")
        return MemoryInfo(free, total)

    def stats(self) -> MemoryStats:
        status = _bytes_of("/proc/self/status", "RssAnon", "RssShmem", "RssFile", "VmRSS", "VmHWM")
        anonymous, shared, files, resident, peak = status
        allocated = anonymous + shared  # an exported storage is shared
        return MemoryStats(
            allocated_bytes=allocated,
            reserved_bytes=resident,
            peak_allocated_bytes=max(allocated, peak - files),  # the kernel's peak includes pages of libraries
        )

    def reset_peak(self) -> None:
        # "5" resets VmHWM to the current resident set: proc(5), clear_refs.
        Path("/proc/self/clear_refs").write_text("5")

    def empty_cache(self) -> None:
        """Return freed pages, which glibc keeps, to the kernel."""
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)

    def host_alloc(self, nbytes: int) -> HostBuffer:
        check_nbytes(nbytes)
        return HostBuffer(map_pages(nbytes), is_pinned=False)

    @property
    def can_pin(self) -> bool:
        return False


_FEWEST_SLOTS = 8  # so that a small machine can try programs for eight devices


@final
class CpuDevice(GenericTorchDevice):
    """Host memory and processors. An index is a slot for one worker process; all slots share the machine."""

    memory_class: ClassVar[type[TorchMemory]] = CpuMemory
    streams_class: ClassVar[type[TorchStreams]] = CpuStreams

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        return Probe(max(_FEWEST_SLOTS, len(os.sched_getaffinity(0))))

    def properties(self) -> DeviceProperties:
        return DeviceProperties(
            name=_processor_name(),
            # One uuid for each running kernel, because its processes share this memory.
            uuid=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            total_bytes=self.memory.info().total_bytes,
            capability=torch.backends.cpu.get_cpu_capability(),
            cores=len(os.sched_getaffinity(0)),
        )

    def activate(self) -> None:
        """Do nothing: tensors without a device are on the CPU."""

    def synchronize(self) -> None:
        """Do nothing: operators on the CPU return when they are done."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")  # the device of CPU tensors; torch.device("cpu", 0) is not equal to it

    def _generator(self) -> torch.Generator:
        return torch.default_generator
