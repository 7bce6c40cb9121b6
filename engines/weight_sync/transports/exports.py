"""Memory that one sender shares with other processes, until it has taken it back."""

from __future__ import annotations

from collections.abc import Iterable

from rlcore.device import Device
from rlcore.types import IpcHandle


class Exports:
    """Handles of a device's memory. One that cannot be taken back yet is kept, and tried again the next time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._handles: dict[str, IpcHandle] = {}

    def add(self, handles: Iterable[IpcHandle]) -> None:
        self._handles |= {handle.export_id: handle for handle in handles}

    def __len__(self) -> int:
        return len(self._handles)

    def take_back(self, timeout_s: float) -> None:
        """Have others close all of it.

        Raises:
            StateError: a receiver does not let go; the memory stays owned.
        """
        living = {export.export_id for export in self._device.memory.ledger()} if self._handles else set()
        while self._handles:
            export_id, handle = next(iter(self._handles.items()))
            if export_id in living:
                self._device.memory.revoke(handle, timeout_s=timeout_s)
            del self._handles[export_id]
