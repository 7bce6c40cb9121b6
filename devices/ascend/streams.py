"""Streams and events of NPUs. An event can be waited for by another process where torch_npu has handles of it."""

from __future__ import annotations

import contextlib
from typing import Any, final

import torch

from rlcore.devices.ascend.npu import npu
from rlcore.devices.streams import TorchStreams
from rlcore.errors import InvalidInputError
from rlcore.process.status import boot_id
from rlcore.types import Capability, EventHandle


@final
class AscendStreams(TorchStreams):
    def limits(self) -> dict[str, Capability]:
        if hasattr(npu().Event, "from_ipc_handle"):
            return {}
        reason = "this torch_npu has no handles of events, which came with its 7.3.0 releases; synchronize instead"
        local_only = Capability("unsupported", self._device.evidence, reason)
        return {"export_event": local_only, "import_event": local_only}

    def new(self, priority: int = 0) -> Any:
        return npu().Stream(self._device.torch_device, priority=min(priority, 0))  # 0 is lowest

    def current(self) -> Any:
        return npu().current_stream(self._device.torch_device)

    def use(self, stream: torch.Stream) -> contextlib.AbstractContextManager[torch.Stream]:
        context: contextlib.AbstractContextManager[torch.Stream] = npu().stream(stream)
        return context

    def event(self, timing: bool = False, interprocess: bool = False) -> Any:
        if timing and interprocess:
            raise InvalidInputError("an interprocess event measures no time; ask for timing=True or interprocess=True")
        if interprocess and "export_event" in self.limits():
            raise self.unsupported("export_event")
        return npu().Event(enable_timing=timing, interprocess=interprocess)

    def export_event(self, event: torch.Event) -> EventHandle:
        if "export_event" in self.limits():
            raise self.unsupported("export_event")
        if not isinstance(event, npu().Event):
            raise InvalidInputError(f"export_event takes what event(interprocess=True) made, got {event!r}")
        with npu().device(self._device.index):
            payload: bytes = event.ipc_handle()
        return EventHandle(
            device=self._device.spec.name,
            device_uuid=self._device.properties().uuid,
            boot_id=boot_id(),
            payload=payload,
        )

    def import_event(self, handle: EventHandle) -> Any:
        if "import_event" in self.limits():
            raise self.unsupported("import_event")
        if not isinstance(handle, EventHandle) or handle.device != self._device.spec.name:
            raise InvalidInputError(f"import_event takes an EventHandle of {self._device.spec.name}, got {handle!r}")
        if handle.boot_id != boot_id():
            raise InvalidInputError("this event is of another machine, or of before this one was restarted")
        return npu().Event.from_ipc_handle(self._device.torch_device, handle.payload)
