"""A device is made of parts: memory, streams, collectives, profiler. This is what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlcore.arguments import Checked
from rlcore.device import DevicePart
from rlcore.errors import UnsupportedError
from rlcore.types import Capability

if TYPE_CHECKING:
    from rlcore.devices.generic import GenericTorchDevice


class TorchPart(Checked, DevicePart):
    """One part of one device.

    A vendor's part overrides the members that it does otherwise, and says in ``limits()`` which it has to emulate or
    does not have. What is unsupported raises ``self.unsupported(member)``, whose reason is the one in ``limits()``.
    Arguments of the kinds in ``accepts`` need no check in the members.
    """

    name: ClassVar[str]
    members: ClassVar[tuple[str, ...]]

    def __init__(self, device: GenericTorchDevice) -> None:
        self._device = device

    def limits(self) -> dict[str, Capability]:
        return {}

    def capabilities(self) -> dict[str, Capability]:
        native = {member: Capability("native", self._device.evidence) for member in self.members}
        return {f"{self.name}.{member}": how for member, how in (native | self.limits()).items()}

    def unsupported(self, member: str) -> UnsupportedError:
        return UnsupportedError(f"{self.name}.{member} on {self._device.name}", self.limits()[member].reason)
