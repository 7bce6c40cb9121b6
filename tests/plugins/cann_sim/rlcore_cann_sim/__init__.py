"""What ``import torch`` runs where the stand-in is installed: torch_npu, and its operators replaced."""

from __future__ import annotations

import os
from pathlib import Path


def take_over() -> None:
    """The operators of the CPU take the place of the NPU's; called by torch at the end of ``import torch``."""
    import torch
    import torch_npu  # noqa: F401 - registers what is replaced

    from rlcore_cann_sim import vendor_operators

    torch.ops.load_library(str(Path(os.environ["CANN_SIM_LIBRARIES"], "liboperators.so")))
    torch.ops.cann_sim.take_over()
    vendor_operators.register()
