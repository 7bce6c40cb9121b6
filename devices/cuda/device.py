"""NVIDIA GPUs."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from rlcore.devices.collectives import Collectives
from rlcore.devices.cuda.collectives import NcclCollectives
from rlcore.devices.generic import GenericTorchDevice
from rlcore.types import DeviceProperties, DeviceSpec, Probe


@final
class CudaDevice(GenericTorchDevice):
    """One GPU, by its index among the visible ones."""

    collectives_class: ClassVar[type[Collectives]] = NcclCollectives

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        if torch.version.cuda is None:
            return Probe(0, "this torch build has no CUDA; install a CUDA build of torch")
        # Counts through NVML when it can, so that no context is created: torch.cuda.device_count.
        count = torch.cuda.device_count()
        return Probe(count, "" if count else "no NVIDIA GPU or driver was found; see nvidia-smi")

    def properties(self) -> DeviceProperties:
        found = torch.cuda.get_device_properties(self.index)
        return DeviceProperties(
            name=found.name,
            uuid=str(found.uuid),
            total_bytes=found.total_memory,
            capability=f"{found.major}.{found.minor}",
            cores=found.multi_processor_count,
        )

    def _generator(self) -> torch.Generator:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # default_generators is empty before
        return torch.cuda.default_generators[self.index]
