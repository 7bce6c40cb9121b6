"""Streams and events of the CPU, whose operators are done when they return, so that any order is kept."""

from __future__ import annotations

import contextlib
import time
from typing import Any, ClassVar, Self, final

from rlcore.arguments import Checked, Kind, optional
from rlcore.devices.streams import TorchStreams
from rlcore.errors import InvalidInputError, StateError
from rlcore.types import Capability

_ANY_STREAM = Kind("a stream of the CPU", lambda value: isinstance(value, CpuStream))
_ANY_EVENT = Kind("an event of the CPU", lambda value: isinstance(value, CpuEvent))


@final
class CpuStream(Checked):
    """A stream of the CPU: queued work is already done."""

    accepts: ClassVar = {
        "wait_stream": {"stream": _ANY_STREAM},
        "wait_event": {"event": _ANY_EVENT},
        "record_event": {"event": optional(_ANY_EVENT)},
    }

    def wait_stream(self, stream: CpuStream) -> None:
        pass

    def wait_event(self, event: CpuEvent) -> None:
        pass

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = event or CpuEvent(timing=False)
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@final
class CpuEvent(Checked):
    """A point in time: work queued before it is already done."""

    accepts: ClassVar = {
        "record": {"stream": optional(_ANY_STREAM)},
        "wait": {"stream": optional(_ANY_STREAM)},
        "elapsed_time": {"end": _ANY_EVENT},
    }

    def __init__(self, *, timing: bool) -> None:
        self._timing = timing
        self._recorded_s: float | None = None

    def record(self, stream: CpuStream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: CpuStream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: CpuEvent) -> float:
        """Return the milliseconds from this event to ``end``."""
        if not (self._timing and end._timing):
            raise InvalidInputError("elapsed_time takes two events made with timing=True")
        if self._recorded_s is None or end._recorded_s is None:
            raise StateError("elapsed_time takes two events that were recorded; call record() on both first")
        return (end._recorded_s - self._recorded_s) * 1000


_STREAM = CpuStream()


@final
class CpuStreams(TorchStreams):
    members: ClassVar = TorchStreams.members

    def limits(self) -> dict[str, Capability]:
        reason = "operators on the CPU are done when they return, so that every order holds already"
        in_order = Capability("emulated", self._device.evidence, reason)
        return super().limits() | dict.fromkeys(("new", "current", "use", "event"), in_order)

    def new(self, priority: int = 0) -> Any:
        return CpuStream()

    def current(self) -> Any:
        return _STREAM

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return stream  # type: ignore[no-any-return]

    def _new_event(self, timing: bool, interprocess: bool) -> Any:
        return CpuEvent(timing=timing)
