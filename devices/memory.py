"""Memory of a device: what is there, what this process holds, host memory to copy from, and sharing with others."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlcore.devices.part import Part
from rlcore.types import MemoryInfo, MemoryStats


class Memory(Part):
    """Through ``torch.accelerator``, which covers CUDA, ROCm, XPU, MPS and out-of-tree back ends."""

    name: ClassVar = "memory"
    members: ClassVar = (
        "info",
        "stats",
        "reset_peak",
        "empty_cache",
        "pool",
        "host_alloc",
        "host_free",
        "copy_batch",
        "export_ipc",
        "import_ipc",
        "revoke",
    )

    def info(self) -> MemoryInfo:
        """Free and total bytes of the whole device, whoever uses it."""
        free, total = torch.get_device_module(self._torch_device).mem_get_info(self._torch_device)
        return MemoryInfo(int(free), int(total))

    def stats(self) -> MemoryStats:
        """What this process's allocator holds."""
        return MemoryStats(
            allocated_bytes=torch.accelerator.memory_allocated(self._torch_device),
            reserved_bytes=torch.accelerator.memory_reserved(self._torch_device),
            peak_allocated_bytes=torch.accelerator.max_memory_allocated(self._torch_device),
        )

    def reset_peak(self) -> None:
        """Start a new measurement of ``stats().peak_allocated_bytes``."""
        torch.accelerator.reset_peak_memory_stats(self._torch_device)

    def empty_cache(self) -> None:
        """Give freed memory that the allocator keeps back to the device."""
        torch.accelerator.empty_cache()

    @property
    def can_pin(self) -> bool:
        """Copies to and from this device are faster from page-locked host memory."""
        return True

    @property
    def _torch_device(self) -> torch.device:
        return self._device.torch_device
