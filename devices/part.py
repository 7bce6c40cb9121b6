"""The base of a device's parts: memory, streams, collectives, profiler."""

from __future__ import annotations

from typing import ClassVar

from rlcore.arguments import Checked
from rlcore.device import Device, DevicePart
from rlcore.errors import UnsupportedError
from rlcore.types import Capability


class TorchPart(Checked, DevicePart):
    """One part of one device.

    A vendor's part overrides members, and declares in ``limits()`` those that it emulates or does not have. An
    unsupported member raises ``self.unsupported(member)``, with the reason in ``limits()``. The kinds in ``accepts``
    are checked before a member is called.
    """

    name: ClassVar[str]
    members: ClassVar[tuple[str, ...]]

    def __init__(self, device: Device) -> None:
        self._device = device

    def limits(self) -> dict[str, Capability]:
        return {}

    def capabilities(self) -> dict[str, Capability]:
        native = {member: Capability("native", self._device.evidence) for member in self.members}
        return {f"{self.name}.{member}": how for member, how in (native | self.limits()).items()}

    def unsupported(self, member: str) -> UnsupportedError:
        return UnsupportedError(f"{self.name}.{member} on {self._device.name}", self.limits()[member].reason)
