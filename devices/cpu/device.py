"""The host processor as a device: the same verbs, measured on process and machine memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import ClassVar, final

import torch

from rlcore.devices.collectives import TorchCollectives
from rlcore.devices.cpu.collectives import GlooCollectives
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
    """Bytes in the "Field:  123 kB" lines of a /proc file, all of one moment."""
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
    """The resident set of this process stands for what an allocator would hold."""

    sharing_class: ClassVar[type[Sharing] | None] = CpuSharing

    def limits(self) -> dict[str, Capability]:
        limits = super().limits()
        del limits["host_alloc"], limits["copy_batch"]  # the device copies as fast from any memory
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
            peak_allocated_bytes=max(allocated, peak - files),  # the kernel's peak has the pages of libraries in it
        )

    def reset_peak(self) -> None:
        # "5" resets VmHWM to the present resident set: proc(5), clear_refs.
        Path("/proc/self/clear_refs").write_text("5")

    def empty_cache(self) -> None:
        """glibc keeps freed pages; hand them back."""
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)

    def host_alloc(self, nbytes: int) -> HostBuffer:
        check_nbytes(nbytes)
        return HostBuffer(map_pages(nbytes), is_pinned=False)

    @property
    def can_pin(self) -> bool:
        return False


_FEWEST_SLOTS = 8  # so that what runs on eight devices can be tried on a small machine


@final
class CpuDevice(GenericTorchDevice):
    """Host memory and processors. Its indices are slots, for a worker process each; all share the machine."""

    memory_class: ClassVar[type[TorchMemory]] = CpuMemory
    streams_class: ClassVar[type[TorchStreams]] = CpuStreams
    collectives_class: ClassVar[type[TorchCollectives]] = GlooCollectives

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        return Probe(max(_FEWEST_SLOTS, len(os.sched_getaffinity(0))))

    def properties(self) -> DeviceProperties:
        return DeviceProperties(
            name=_processor_name(),
            # One per running kernel, which is what shares this memory.
            uuid=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            total_bytes=self.memory.info().total_bytes,
            capability=torch.backends.cpu.get_cpu_capability(),
            cores=len(os.sched_getaffinity(0)),
        )

    def activate(self) -> None:
        """Tensors that name no device land on the CPU already."""

    def synchronize(self) -> None:
        """Operators on the CPU return when they are done."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")  # as tensors say it: torch.device("cpu", 0) is not equal to it

    def _generator(self) -> torch.Generator:
        return torch.default_generator
