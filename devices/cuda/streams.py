"""Streams and events of NVIDIA GPUs. Another process can wait for an event."""

from __future__ import annotations

import contextlib
from typing import final

import torch

from rlcore.devices.streams import TorchStreams
from rlcore.errors import InvalidInputError
from rlcore.probing import short_line
from rlcore.types import Capability, EventHandle


@final
class CudaStreams(TorchStreams):
    def limits(self) -> dict[str, Capability]:
        return {}

    def new(self, priority: int = 0) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device.torch_device, priority=min(priority, 0))  # type: ignore[no-untyped-call]  # 0 is lowest

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.torch_device)

    def use(self, stream: torch.Stream) -> contextlib.AbstractContextManager[torch.Stream]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def _new_event(self, timing: bool, interprocess: bool) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timing, interprocess=interprocess)  # type: ignore[no-untyped-call]

    def _event_payload(self, event: torch.Event) -> bytes:
        if not isinstance(event, torch.cuda.Event):
            raise InvalidInputError(f"export_event takes what event(interprocess=True) made, got {event!r}")
        try:
            with torch.cuda.device(self._device.index):
                payload: bytes = event.ipc_handle()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # an event does not tell how it was made
            raise InvalidInputError(
                f"export_event takes what event(interprocess=True) made; the driver has no handle of {event!r}: "
                f"{short_line(error).rstrip('. ')}. "
                f"Make the event with {self._device.name}'s streams.event(interprocess=True)"
            ) from error
        return payload

    def _open_event(self, handle: EventHandle) -> torch.cuda.Event:
        try:
            event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(  # type: ignore[no-untyped-call]
                self._device.torch_device, handle.payload
            )
        except RuntimeError as error:
            raise InvalidInputError(
                f"import_event: {self._device.name} cannot open this event of GPU {handle.device_uuid}: "
                f"{short_line(error).rstrip('. ')}. "
                "That GPU must be visible here, and its process must still hold the event"
            ) from error
        return event
