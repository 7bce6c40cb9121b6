"""Queues of work on a device, and events that order them."""

from __future__ import annotations

from typing import ClassVar

from rlcore.devices.part import Part


class Streams(Part):
    """Through ``torch.Stream`` and ``torch.Event``."""

    name: ClassVar = "streams"
    members: ClassVar = ("new", "current", "use", "event", "import_event")
