"""Queues of work on a device, and events that order them."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch

from rlcore.arguments import FLAG, WHOLE, Kind
from rlcore.device import Streams
from rlcore.devices.part import TorchPart
from rlcore.errors import InvalidInputError
from rlcore.process.status import boot_id
from rlcore.types import Capability, EventHandle

STREAM = Kind("a stream of this device", lambda value: callable(getattr(value, "wait_stream", None)))


class TorchStreams(TorchPart, Streams):
    """Streams through ``torch.Stream`` and ``torch.Event``.

    A vendor whose events have handles for other processes replaces ``limits`` and the three methods ``_new_event``,
    ``_event_payload`` and ``_open_event``.
    """

    name: ClassVar = "streams"
    members: ClassVar = ("new", "current", "use", "event", "export_event", "import_event")
    accepts: ClassVar = {
        "new": {"priority": WHOLE},
        "use": {"stream": STREAM},
        "event": {"timing": FLAG, "interprocess": FLAG},
    }

    def limits(self) -> dict[str, Capability]:
        return self._without_interprocess_events(
            "torch.Event has no handle for other processes; synchronize before they are told to go on"
        )

    def _without_interprocess_events(self, reason: str) -> dict[str, Capability]:
        local_only = Capability("unsupported", self._device.evidence, reason)
        return {"export_event": local_only, "import_event": local_only}

    def new(self, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=self._device.torch_device, priority=priority)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device.torch_device)

    def use(self, stream: torch.Stream) -> contextlib.AbstractContextManager[torch.Stream]:
        return stream

    def event(self, timing: bool = False, interprocess: bool = False) -> torch.Event:
        if timing and interprocess:
            raise InvalidInputError("an interprocess event measures no time; ask for timing=True or interprocess=True")
        if interprocess and "export_event" in self.limits():
            raise self.unsupported("export_event")
        return self._new_event(timing, interprocess)

    def export_event(self, event: torch.Event) -> EventHandle:
        if "export_event" in self.limits():
            raise self.unsupported("export_event")
        return EventHandle(
            payload=self._event_payload(event),
            device=self._device.spec.name,
            device_uuid=self._device.properties().uuid,
            boot_id=boot_id(),
        )

    def import_event(self, handle: EventHandle) -> torch.Event:
        if "import_event" in self.limits():
            raise self.unsupported("import_event")
        if not isinstance(handle, EventHandle) or handle.device != self._device.spec.name:
            raise InvalidInputError(f"import_event takes an EventHandle of {self._device.spec.name}, got {handle!r}")
        if handle.boot_id != boot_id():
            raise InvalidInputError("this event is of another machine, or of before this one was restarted")
        return self._open_event(handle)

    def _new_event(self, timing: bool, interprocess: bool) -> torch.Event:
        return torch.Event(device=self._device.torch_device, enable_timing=timing)

    def _event_payload(self, event: torch.Event) -> bytes:
        """Return the vendor's handle of an event. Raises InvalidInputError for an event that has none."""
        raise self.unsupported("export_event")

    def _open_event(self, handle: EventHandle) -> torch.Event:
        """Open the event behind a handle of such a device on this machine. Raises InvalidInputError if it is gone."""
        raise self.unsupported("import_event")
