"""Which implementations in Triton are offered on an NPU if a Triton builds for it: no compiler is asked."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget

from rlcore.kernels import plugin
from rlcore.kernels import triton_target as target
from rlcore.kernels.dispatch import Query
from rlcore.registry import resolve
from tests.kernels.triton_cases import launched, reached_files

DEVICE, ARCHITECTURE = "npu", "Ascend910B1"
_TRITON = {
    "_driver_device_type": lambda: DEVICE,
    "_target": lambda: GPUTarget(DEVICE, ARCHITECTURE, 0),
    "_interprets": lambda: False,
    "_absence_here": target._absence_here.__wrapped__,  # what is kept is of the Triton that is here
}


def implementations() -> list[dict[str, Any]]:
    """What is registered, with the kernels that it launches and why it would not be offered."""
    kernels = launched().keys()
    found = []
    with mock.patch.multiple(target, **_TRITON):
        for op, name, _, path, when in plugin._TRITON:
            files = kernels & reached_files(path.partition(":")[0])
            refusal = resolve(f"rlcore.kernels.triton_target:{when}")(Query(DEVICE, torch.bfloat16, 4096, 151_936))
            found.append({"op": op, "name": name, "files": sorted(files), "refusal": refusal})
    return found
