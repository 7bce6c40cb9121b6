"""A function that the other process runs in tests of launch facts."""

from __future__ import annotations

from rlcore.device import Device
from rlcore.registry import get_device


def count_and_uuids(device: Device) -> tuple[int, list[str]]:
    count = device.count()
    return count, [get_device(f"{device.spec.name}:{index}").properties().uuid for index in range(count)]
