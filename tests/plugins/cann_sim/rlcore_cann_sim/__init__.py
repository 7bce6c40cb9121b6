"""What ``import torch`` runs where the stand-in is installed: torch_npu, and its operators replaced."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path


def take_over() -> None:
    """The operators of the CPU take the place of the NPU's; called by torch at the end of ``import torch``."""
    import torch
    import torch_npu  # noqa: F401 - registers what is replaced

    from rlcore_cann_sim import recorder, vendor_operators

    _begin_log()
    torch.ops.load_library(str(Path(os.environ["CANN_SIM_LIBRARIES"], "liboperators.so")))
    torch.ops.cann_sim.take_over()
    vendor_operators.register()
    if record := os.environ.get("CANN_SIM_RECORD"):
        recorder.begin(Path(record))


def _begin_log() -> None:
    """Of this run: a process and those that it starts have one, by its variable. Without it, it is made and removed."""
    if "CANN_SIM_LOG" not in os.environ:
        handle, os.environ["CANN_SIM_LOG"] = tempfile.mkstemp(prefix="cann_sim-", suffix=".log")
        os.close(handle)
        atexit.register(Path(os.environ["CANN_SIM_LOG"]).unlink, missing_ok=True)
    Path(os.environ["CANN_SIM_LOG"]).touch()
