"""A device that is described by its registration alone: what its torch can do is known, and nobody has run it."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from rlcore.devices.declared.sharing import TorchSharing
from rlcore.devices.generic import GenericTorchDevice
from rlcore.devices.ipc.sharing import Sharing
from rlcore.devices.memory import TorchMemory
from rlcore.types import Capability, DeviceSpec, Evidence, Probe


class DeclaredMemory(TorchMemory):
    """Memory of a device that torch's own processes cannot share."""

    def limits(self) -> dict[str, Capability]:
        limits = super().limits()
        if self.sharing_class is None:
            reason = f"torch.multiprocessing has no handle of {self._device.type} memory"
            unshared = Capability("unsupported", self._device.evidence, reason)
            limits |= dict.fromkeys(("export_ipc", "import_ipc", "revoke", "ledger"), unshared)
        return limits


@final
class RocmMemory(DeclaredMemory):
    """Memory that torch's own processes share by HIP's handles."""

    sharing_class: ClassVar[type[Sharing] | None] = TorchSharing


class DeclaredDevice(GenericTorchDevice):
    """A device of a vendor without a plugin, as far as torch itself carries it."""

    memory_class: ClassVar[type[TorchMemory]] = DeclaredMemory
    evidence: ClassVar[Evidence] = "declared"

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        if not _is_in_torch(spec):
            return Probe(
                0, f"declared: torch {torch.__version__} has no such back end here; install one that is built for it"
            )
        return super().probe(spec)


def _is_in_torch(spec: DeviceSpec) -> bool:
    """Return True if this torch was built for the device, or an extension has added it. It initialises nothing."""
    built_for = torch.accelerator.current_accelerator()
    if built_for is None or built_for.type != spec.torch_type:
        return False
    return spec.torch_build is None or getattr(torch.version, spec.torch_build, None) is not None


@final
class RocmDevice(DeclaredDevice):
    """A GPU of AMD under a ROCm build of torch."""

    memory_class: ClassVar[type[TorchMemory]] = RocmMemory
