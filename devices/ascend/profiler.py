"""Named ranges for torch's and for Huawei's profilers."""

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
        """Name a range in torch's traces and, through mstx, in those of msprof."""
        with super().range(name):
            npu().mstx.range_push(name)
            try:
                yield
            finally:
                npu().mstx.range_pop()
