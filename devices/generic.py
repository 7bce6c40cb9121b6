"""What every torch device can do, written once over ``torch.accelerator`` and ``torch.get_device_module``.

A vendor's device subclasses ``GenericTorchDevice`` and adds ``probe()`` and ``properties()``. A part that a
device does not have raises ``UnsupportedError``; nothing is a silent no-op.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from rlcore.errors import UnsupportedError
from rlcore.types import DeviceProperties, DeviceSpec, MemoryInfo, MemoryStats, Probe


class Memory(ABC):
    """Memory of one device."""

    @abstractmethod
    def info(self) -> MemoryInfo:
        """Free and total bytes of the whole device, whoever uses it."""

    @abstractmethod
    def stats(self) -> MemoryStats:
        """What this process's allocator holds."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new measurement of ``stats().peak_allocated_bytes``."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give freed memory that the allocator keeps back to the device."""

    @property
    @abstractmethod
    def can_pin(self) -> bool:
        """Copies to and from this device are faster from page-locked host memory."""


class AcceleratorMemory(Memory):
    """Through ``torch.accelerator``, which covers CUDA, ROCm, XPU, MPS and out-of-tree back ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def info(self) -> MemoryInfo:
        free, total = torch.get_device_module(self._device).mem_get_info(self._device)
        return MemoryInfo(int(free), int(total))

    def stats(self) -> MemoryStats:
        return MemoryStats(
            allocated_bytes=torch.accelerator.memory_allocated(self._device),
            reserved_bytes=torch.accelerator.memory_reserved(self._device),
            peak_allocated_bytes=torch.accelerator.max_memory_allocated(self._device),
        )

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    @property
    def can_pin(self) -> bool:
        return True


class GenericTorchDevice(ABC):
    """One device, by index."""

    def __init__(self, spec: DeviceSpec, index: int) -> None:
        self.spec = spec
        self.index = index
        self.memory = self._make_memory()

    def _make_memory(self) -> Memory:
        return AcceleratorMemory(self.torch_device)

    @staticmethod
    @abstractmethod
    def probe() -> Probe:
        """Whether such devices can be used here. Must not initialise one."""

    @abstractmethod
    def properties(self) -> DeviceProperties:
        """Product name, uuid, memory, generation and cores."""

    @property
    def name(self) -> str:
        return f"{self.spec.name}:{self.index}"

    @property
    def vendor(self) -> str:
        return self.spec.vendor

    @property
    def type(self) -> str:
        """``torch.device.type``."""
        return self.spec.torch_type

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type, self.index)

    def count(self) -> int:
        """Number of such devices visible to this process."""
        return self.probe().count

    def activate(self) -> None:
        """Make this the current device of the process, where tensors land that name only its type."""
        torch.accelerator.set_device_index(self.index)

    def synchronize(self) -> None:
        """Wait until all work queued on this device is done."""
        torch.accelerator.synchronize(self.torch_device)

    def seed(self, value: int) -> None:
        """Seed this device's default random generator."""
        self._generator().manual_seed(value)

    def rng_state(self) -> torch.Tensor:
        """State of the default generator, a uint8 host tensor."""
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator().set_state(state)

    def _generator(self) -> torch.Generator:
        module: Any = torch.get_device_module(self.torch_device)
        generator: torch.Generator = module.default_generators[self.index]
        return generator

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark a phase in torch.profiler traces."""
        with torch.profiler.record_function(name):
            yield

    def unsupported(self, feature: str, reason: str) -> UnsupportedError:
        return UnsupportedError(f"{feature} on {self.name}", reason)

    def __repr__(self) -> str:
        return f"<{self.vendor} device {self.name}>"
