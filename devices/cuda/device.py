"""NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import ClassVar, final

import torch

from rlcore.devices.cuda.memory import CudaMemory
from rlcore.devices.cuda.nvml import Nvml
from rlcore.devices.cuda.profiler import CudaProfiler
from rlcore.devices.cuda.streams import CudaStreams
from rlcore.devices.generic import GenericTorchDevice
from rlcore.devices.memory import TorchMemory
from rlcore.devices.profiler import TorchProfiler
from rlcore.devices.streams import TorchStreams
from rlcore.errors import DeviceError, MissingDependencyError
from rlcore.launch import LaunchFacts
from rlcore.types import DeviceProcess, DeviceProperties, DeviceSpec, DeviceStatus, Probe


@final
class CudaDevice(GenericTorchDevice):
    """One GPU, by its index among the visible ones."""

    memory_class: ClassVar[type[TorchMemory]] = CudaMemory
    streams_class: ClassVar[type[TorchStreams]] = CudaStreams
    profiler_class: ClassVar[type[TorchProfiler]] = CudaProfiler

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        if torch.version.cuda is None:
            return Probe(0, "this torch build has no CUDA; install a CUDA build of torch")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Counts through NVML when it can; no context is made either way.
            count = torch.cuda.device_count()
        if count:
            return Probe(count)
        if LaunchFacts(spec).visible_devices() == []:
            return Probe(0, f"{spec.visible_devices_variable} hides all GPUs from this process")
        said = [str(warning.message) for warning in caught]  # for example that the driver is too old
        return Probe(0, "; ".join(["no NVIDIA GPU or driver can be used; see nvidia-smi", *said]))

    def properties(self) -> DeviceProperties:
        """Return the properties. This initialises CUDA, but makes no context, so it takes no device memory."""
        found = torch.cuda.get_device_properties(self.index)
        return DeviceProperties(
            name=found.name,
            uuid=str(found.uuid),
            total_bytes=found.total_memory,
            capability=f"{found.major}.{found.minor}",
            cores=found.multi_processor_count,
        )

    def versions(self) -> dict[str, str]:
        found = {"CUDA": str(torch.version.cuda)}
        with contextlib.suppress(MissingDependencyError, DeviceError):
            found["driver"] = self.driver_version()
        return found

    def driver_version(self) -> str:
        """Return the driver's version.

        Raises:
            MissingDependencyError: nvidia-ml-py is absent; the next two methods raise it too.
            DeviceError: NVML does not answer; the next two methods raise it too.
        """
        return self._nvml.driver_version()

    def telemetry(self) -> DeviceStatus:
        return self._nvml.status(self._uuid)

    def processes(self) -> list[DeviceProcess]:
        return self._nvml.processes(self._uuid)

    @functools.cached_property
    def _nvml(self) -> Nvml:
        """Return a connection that stays open as long as the process, because opening costs milliseconds."""
        return Nvml()

    @functools.cached_property
    def _uuid(self) -> str:
        return self.properties().uuid

    def _generator(self) -> torch.Generator:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # default_generators is empty before
        return torch.cuda.default_generators[self.index]
