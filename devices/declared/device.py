"""A device that is described by its registration alone: what its torch can do is known, and nobody has run it."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from rlcore.devices.generic import GenericTorchDevice
from rlcore.types import DeviceSpec, Evidence, Probe


@final
class DeclaredDevice(GenericTorchDevice):
    """A device of a vendor without a plugin, as far as torch itself carries it."""

    evidence: ClassVar[Evidence] = "declared"

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        if not _is_in_torch(spec):
            return Probe(0, f"declared: torch {torch.__version__} has no such back end here")
        return super().probe(spec)


def _is_in_torch(spec: DeviceSpec) -> bool:
    """Return True if this torch was built for the device, or an extension has added it. It initialises nothing."""
    built_for = torch.accelerator.current_accelerator()
    if built_for is None or built_for.type != spec.torch_type:
        return False
    return spec.torch_build is None or getattr(torch.version, spec.torch_build, None) is not None
