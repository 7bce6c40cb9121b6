"""Named ranges in traces, and recording of traces to files, over torch.profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlcore.arguments import PATH, TEXT
from rlcore.device import Profiler
from rlcore.devices.part import TorchPart
from rlcore.errors import InvalidInputError, StateError


class _Trace:
    """The trace that this process records; torch has one profiler for each process."""

    profile: Any = None
    path: Path = Path()


class TorchProfiler(TorchPart, Profiler):
    """A profiler through torch.profiler, which records the host and every device that it knows."""

    name: ClassVar = "profiler"
    members: ClassVar = ("range", "start", "stop")
    accepts: ClassVar = {"range": {"name": TEXT}, "start": {"path": PATH}}

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            yield

    def start(self, path: str | Path) -> None:
        path = Path(path)
        if not path.name.endswith((".json", ".json.gz")):
            raise InvalidInputError(f"a trace is written to a .json or .json.gz file, got {str(path)!r}")
        if not path.parent.is_dir():
            raise InvalidInputError(f"a trace cannot be written to {str(path)!r}: its folder does not exist")
        if _Trace.profile is not None:
            raise StateError(f"a trace to {_Trace.path} is being recorded; call profiler.stop() first")
        profile = torch.profiler.profile(acc_events=True)
        profile.start()
        _Trace.profile, _Trace.path = profile, path

    def stop(self) -> Path:
        if _Trace.profile is None:
            raise StateError("no trace is being recorded; call profiler.start(path) first")
        self._device.synchronize()
        profile, _Trace.profile = _Trace.profile, None
        profile.stop()
        profile.export_chrome_trace(str(_Trace.path))
        return _Trace.path
