"""Queues of work on a device, and events that order them."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch

from rlcore.arguments import FLAG, WHOLE, Kind
from rlcore.devices.part import Part
from rlcore.errors import InvalidInputError
from rlcore.types import Capability, EventHandle

STREAM = Kind("a stream of this device", lambda value: callable(getattr(value, "wait_stream", None)))


class Streams(Part):
    """Through ``torch.Stream`` and ``torch.Event``.

    A stream has ``wait_stream``, ``wait_event``, ``record_event``, ``query``, ``synchronize``; an event has ``record``,
    ``wait``, ``query``, ``synchronize``, ``elapsed_time``.
    """

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
        """A queue of its own on this device. Lower numbers go first; what the device does not have is the nearest."""
        return torch.Stream(device=self._device.torch_device, priority=priority)

    def current(self) -> torch.Stream:
        """The queue on which this thread's work lands now."""
        return torch.accelerator.current_stream(self._device.torch_device)

    def use(self, stream: torch.Stream) -> contextlib.AbstractContextManager[torch.Stream]:
        """``with device.streams.use(stream):`` work lands there. Orders nothing: ``wait_stream`` does."""
        return stream

    def event(self, timing: bool = False, interprocess: bool = False) -> torch.Event:
        """A mark in a stream, made by its ``record(stream)``, that other streams and the host can wait for.

        Args:
            timing: ``first.elapsed_time(second)`` gives milliseconds.
            interprocess: it can be given to ``export_event``; excludes timing.

        Raises:
            InvalidInputError: both.
            UnsupportedError: this device has no interprocess events.
        """
        if timing and interprocess:
            raise InvalidInputError("an interprocess event measures no time; ask for timing=True or interprocess=True")
        if interprocess:
            raise self.unsupported("export_event")
        return self._local_event(timing)

    def export_event(self, event: torch.Event) -> EventHandle:
        """A handle by which another process waits for an interprocess event. Keep the event while it is used.

        Raises:
            InvalidInputError: the event was not made with ``interprocess=True``.
        """
        raise self.unsupported("export_event")

    def import_event(self, handle: EventHandle) -> torch.Event:
        """Another process's event; its ``wait(stream)`` orders work here behind what was recorded there.

        Raises:
            InvalidInputError: the handle is of another kind of device, of one not visible here, or another machine; or
                the event is gone with its process.
        """
        raise self.unsupported("import_event")

    def _local_event(self, timing: bool) -> torch.Event:
        return torch.Event(device=self._device.torch_device, enable_timing=timing)
