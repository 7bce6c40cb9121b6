"""Named ranges for torch's and for NVIDIA's profilers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

import torch

from rlcore.devices.profiler import TorchProfiler


@final
class CudaProfiler(TorchProfiler):
    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name a range in torch's traces and, through NVTX, in those of nsys and ncu."""
        with super().range(name):
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
