"""The library DeepSpeed: imported for one kind of device, checked, and quiet.

DeepSpeed keeps its accelerator, its backend and its process groups in globals of the process, so that an executor that
uses it has a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

from rlcore.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from rlcore.device import Device

LEAST_VERSION = (0, 19, 8)
"""The first version with ``managed_gradient_accumulation``, by which the caller says where a step ends."""
INSTALL = "DS_ACCELERATOR=cpu pip install --no-build-isolation"
"""The command that needs no CUDA toolchain: DeepSpeed is a source distribution, which imports torch as it is built."""


def check_installed() -> None:
    """Raise unless a DeepSpeed that is new enough is installed; it is not imported."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError("deepspeed", needed_for='executor="deepspeed"', extra="deepspeed") from error
    if not is_new_enough(found):
        least = ".".join(map(str, LEAST_VERSION))
        raise UnsupportedError(
            f"DeepSpeed {found}", f"the executor needs at least {least}; run: {INSTALL} 'deepspeed>={least}'"
        )


def is_new_enough(version: str) -> bool:
    """Return True if the executor runs with this version of DeepSpeed."""
    numbers = [part for part in version.partition("+")[0].split(".")[:3] if part.isdecimal()]
    return tuple(map(int, numbers)) >= LEAST_VERSION


def deepspeed_for(device: Device) -> Any:
    """Import DeepSpeed for a device of this process, of which the process has no other kind."""
    check_installed()
    torch_device = device.torch_device
    os.environ["DS_ACCELERATOR"] = torch_device.type
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    os.environ["LOCAL_RANK"] = str(torch_device.index or 0)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    # Newer versions of torch say at each of its collectives that they have got another name.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its collectives through the host's shared memory would be compiled at first use, and are none of this group's.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
