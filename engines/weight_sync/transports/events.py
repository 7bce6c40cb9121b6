"""How the two sides of slabs wait for each other: events of one's device, for which the other's device waits.

Where a device has none that other processes know, each process waits for its own device before it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.device import Device
from rlcore.engines.weight_sync.transports.slabs import NUM_SLOTS
from rlcore.errors import RlcoreError
from rlcore.types import EventHandle


class Marks:
    """Of one sender or receiver: an event for each slot, and those of all at the other side."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._own: list[Any] = []
        self._others: list[list[Any]] = []

    def make(self) -> list[bytes]:
        """Handles of new events, by slot; none where this device has none for other processes."""
        streams = self._device.streams
        try:
            self._own = [streams.event(interprocess=True) for _ in range(NUM_SLOTS)]
            return [streams.export_event(event).to_bytes() for event in self._own]
        except (RlcoreError, RuntimeError):  # RuntimeError: the driver's
            return []

    def know(self, others: Sequence[Sequence[bytes]]) -> bool:
        """Take the handles of all at the other side; False where this device cannot wait for one, or there is none."""
        opened = self._device.streams.import_event
        try:
            self._others = [[opened(EventHandle.from_bytes(handle)) for handle in handles] for handles in others]
        except (RlcoreError, RuntimeError):
            return False
        return all(others)

    def set(self, slot: int) -> None:
        """What is queued now is this side's use of the slot."""
        self._own[slot].record(self._device.streams.current())

    def wait(self, slot: int, other: int | None = None) -> None:
        """What is queued from now on waits for the use of the slot by one at the other side; None: by all."""
        for events in self._others if other is None else [self._others[other]]:
            self._device.streams.current().wait_event(events[slot])

    def drop(self) -> None:
        self._own, self._others = [], []
