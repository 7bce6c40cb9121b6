"""What a launcher has to know about a kind of device: string work only, on a machine that may have none of it."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.types import DeviceSpec


@dataclass(frozen=True, slots=True)
class Launch:
    """Facts for starting processes that use devices of one kind."""

    spec: DeviceSpec
