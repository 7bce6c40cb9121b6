"""Huawei's Ascend NPUs, through torch_npu: neither torch_npu nor torch is patched."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import uuid
from typing import ClassVar, final

import torch

from rlcore.devices.ascend import simulation, versions
from rlcore.devices.ascend.collectives import HcclCollectives
from rlcore.devices.ascend.memory import AscendMemory
from rlcore.devices.ascend.npu import npu
from rlcore.devices.ascend.profiler import AscendProfiler
from rlcore.devices.ascend.streams import AscendStreams
from rlcore.devices.collectives import TorchCollectives
from rlcore.devices.generic import GenericTorchDevice
from rlcore.devices.memory import TorchMemory
from rlcore.devices.profiler import TorchProfiler
from rlcore.devices.streams import TorchStreams
from rlcore.launch import LaunchFacts
from rlcore.process.status import boot_id
from rlcore.types import DeviceProperties, DeviceSpec, Evidence, Probe, Simulation


@final
class AscendDevice(GenericTorchDevice):
    """One NPU, by its index among the visible ones.

    It was never tried on an NPU. So its evidence is "declared", or "simulated" where the library below torch_npu says
    that it simulates CANN.
    """

    memory_class: ClassVar[type[TorchMemory]] = AscendMemory
    streams_class: ClassVar[type[TorchStreams]] = AscendStreams
    collectives_class: ClassVar[type[TorchCollectives]] = HcclCollectives
    profiler_class: ClassVar[type[TorchProfiler]] = AscendProfiler

    @property
    def evidence(self) -> Evidence:  # type: ignore[override]  # other devices have a class attribute
        return "simulated" if simulation.name() else "declared"

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        if not hasattr(torch, "npu"):
            return Probe(0, _why_not_loaded())
        if count := npu().device_count():
            return Probe(count)
        if LaunchFacts(spec).visible_devices() == []:
            return Probe(0, f"{spec.visible_devices_variable} hides all NPUs from this process")
        return Probe(0, "torch_npu counts no NPU: there is none, or its driver is missing; see npu-smi info")

    def properties(self) -> DeviceProperties:
        found = npu().get_device_properties(self.index)
        return DeviceProperties(
            name=f"{found.name} ({stand_in})" if (stand_in := simulation.name()) else found.name,
            uuid=_unless_nil(str(getattr(found, "uuid", ""))) or self._made_uuid(),
            total_bytes=self.memory.info().total_bytes,
            capability="",  # torch_npu only repeats a variable
            cores=int(getattr(found, "cube_core_num", 0)),
        )

    def simulation(self) -> Simulation | None:
        return simulation.found()

    def versions(self) -> dict[str, str]:
        return versions.below_torch()

    def activate(self) -> None:
        npu().set_device(self.index)

    def synchronize(self) -> None:
        npu().synchronize(self.index)

    def _made_uuid(self) -> str:
        """Return a uuid made of the boot id and the device's number on this machine, for a device that has none.

        It is the same in all processes that see the device, under any index. It does not distinguish devices of
        containers that each count their own from 0.
        """
        return str(uuid.uuid5(uuid.UUID(boot_id()), f"npu {self.launch.physical_id(self.index)}"))

    def _generator(self) -> torch.Generator:
        npu().init()  # default_generators is empty before
        generator: torch.Generator = npu().default_generators[self.index]
        return generator


def _unless_nil(uuid: str) -> str:
    """Return "" for the nil uuid, which torch_npu returns for every device if CANN has no ``aclrtDeviceGetUuid``."""
    return uuid if uuid.strip("0-") else ""


def _why_not_loaded() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        minor = ".".join(torch.__version__.split(".")[:2])
        return f"torch_npu is not installed: pip install 'torch-npu=={minor}.*', beside a CPU build of torch and CANN"
    version = importlib.metadata.version("torch-npu")
    return (
        f"torch_npu {version} is installed, but was not loaded with torch: unset TORCH_DEVICE_BACKEND_AUTOLOAD, or "
        "import torch_npu first; `rlcore doctor` tells what it needs"
    )
