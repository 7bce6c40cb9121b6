"""Queues of work on a device, and events that order them."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch

from rlcore.arguments import FLAG, WHOLE, Kind
from rlcore.device import Streams
from rlcore.devices.part import TorchPart
from rlcore.errors import InvalidInputError
from rlcore.types import Capability, EventHandle

STREAM = Kind("a stream of this device", lambda value: callable(getattr(value, "wait_stream", None)))


class TorchStreams(TorchPart, Streams):
    """Streams through ``torch.Stream`` and ``torch.Event``."""

    name: ClassVar = "streams"
    members: ClassVar = ("new", "current", "use", "event", "export_event", "import_event")
    accepts: ClassVar = {
        "new": {"priority": WHOLE},
        "use": {"stream": STREAM},
        "event": {"timing": FLAG, "interprocess": FLAG},
    }

    def limits(self) -> dict[str, Capability]:
        reason = "torch.Event has no handle for other processes; synchronize before they are told to go on"
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
        if interprocess:
            raise self.unsupported("export_event")
        return self._local_event(timing)

    def export_event(self, event: torch.Event) -> EventHandle:
        raise self.unsupported("export_event")

    def import_event(self, handle: EventHandle) -> torch.Event:
        raise self.unsupported("import_event")

    def _local_event(self, timing: bool) -> torch.Event:
        return torch.Event(device=self._device.torch_device, enable_timing=timing)
