"""Named phases for Huawei's own profilers as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

from rlcore.devices.ascend.npu import npu
from rlcore.devices.profiler import TorchProfiler


@final
class AscendProfiler(TorchProfiler):
    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark a phase in torch's traces and, through mstx, in those of msprof."""
        with super().range(name):
            npu().mstx.range_push(name)
            try:
                yield
            finally:
                npu().mstx.range_pop()
