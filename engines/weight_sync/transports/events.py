"""Events by which the devices of both sides wait for each other's use of a staging buffer.

Where a device has no events that other processes can open, each process waits for its own device before it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.device import Device
from rlcore.engines.weight_sync.transports.staging_buffers import NUM_SLOTS
from rlcore.errors import RlcoreError
from rlcore.types import EventHandle


class SlotEvents:
    """An event of this sender or receiver for each slot, and the events of all at the other side."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._own: list[Any] = []
        self._others: list[list[Any]] = []

    def export(self) -> list[bytes]:
        """Make new events; returns their handles by slot, none where this device has no events for other processes."""
        streams = self._device.streams
        try:
            self._own = [streams.event(interprocess=True) for _ in range(NUM_SLOTS)]
            return [streams.export_event(event).to_bytes() for event in self._own]
        except (RlcoreError, RuntimeError):  # RuntimeError: the driver's
            return []

    def import_(self, others: Sequence[Sequence[bytes]]) -> bool:
        """Open the handles of all at the other side; returns False where one has none or this device cannot open it."""
        open_event = self._device.streams.import_event
        try:
            self._others = [[open_event(EventHandle.from_bytes(handle)) for handle in handles] for handles in others]
        except (RlcoreError, RuntimeError):
            return False
        return all(others)

    def record(self, slot: int) -> None:
        """Record this side's event of the slot behind what is queued now, which is its use of the slot."""
        self._own[slot].record(self._device.streams.current())

    def wait(self, slot: int, other: int | None = None) -> None:
        """Have what is queued from now on wait until one at the other side, or with None all, have used the slot."""
        for events in self._others if other is None else [self._others[other]]:
            self._device.streams.current().wait_event(events[slot])

    def drop(self) -> None:
        self._own, self._others = [], []
