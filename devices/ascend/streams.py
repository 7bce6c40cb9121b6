"""Streams and events of NPUs. Another process can wait for an event where torch_npu has handles of events."""

from __future__ import annotations

import contextlib
from typing import Any, final

import torch

from rlcore.devices.ascend.npu import npu
from rlcore.devices.streams import TorchStreams
from rlcore.errors import InvalidInputError
from rlcore.types import Capability, EventHandle


@final
class AscendStreams(TorchStreams):
    def limits(self) -> dict[str, Capability]:
        if hasattr(npu().Event, "from_ipc_handle"):
            return {}
        return self._without_interprocess_events(
            "this torch_npu has no handles of events, which came with its 7.3.0 releases; synchronize instead"
        )

    def new(self, priority: int = 0) -> Any:
        return npu().Stream(self._device.torch_device, priority=min(priority, 0))  # 0 is lowest

    def current(self) -> Any:
        return npu().current_stream(self._device.torch_device)

    def use(self, stream: torch.Stream) -> contextlib.AbstractContextManager[torch.Stream]:
        context: contextlib.AbstractContextManager[torch.Stream] = npu().stream(stream)
        return context

    def _new_event(self, timing: bool, interprocess: bool) -> Any:
        return npu().Event(enable_timing=timing, interprocess=interprocess)

    def _event_payload(self, event: torch.Event) -> bytes:
        if not isinstance(event, npu().Event):
            raise InvalidInputError(f"export_event takes what event(interprocess=True) made, got {event!r}")
        with npu().device(self._device.index):
            payload: bytes = event.ipc_handle()
        return payload

    def _open_event(self, handle: EventHandle) -> Any:
        return npu().Event.from_ipc_handle(self._device.torch_device, handle.payload)
