"""What a device's collective library can do, and how a group of it is made."""

from __future__ import annotations

from typing import ClassVar

from rlcore.devices.part import Part


class Collectives(Part):
    """Through the torch.distributed back end that the device was registered with."""

    name: ClassVar = "collectives"
    members: ClassVar = ("backend", "init_kwargs", "reduce_ops", "dtypes")

    @property
    def backend(self) -> str:
        """Name of the torch.distributed back end."""
        return self._device.spec.collective_backend
