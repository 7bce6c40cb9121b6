"""Named phases in traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import torch

from rlcore.devices.part import Part


class Profiler(Part):
    """Through torch.profiler, which records the host and every device it knows."""

    name: ClassVar = "profiler"
    members: ClassVar = ("range", "start", "stop")

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark a phase in traces."""
        with torch.profiler.record_function(name):
            yield
