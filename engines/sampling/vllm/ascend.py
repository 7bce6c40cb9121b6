"""Functions of vllm-ascend, vLLM's plugin for NPUs, where it differs from vLLM.

They are checked against the wheels (``tests/devices/ascend/vllm_contract.py``) and have never run. rlcore's own
extension receives weights, as everywhere; vllm-ascend's weight transfer is not used.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlcore.device import Device
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.settings import Settings

if TYPE_CHECKING:
    from rlcore.engines.sampling.vllm.interfaces import VllmAllocation

VERSIONS = ("0.23.0", "0.26.0rc1")
"""Versions whose wheels were read; the code of other versions may differ."""
_DISTRIBUTION = "vllm-ascend"
_INSTALL = f"pip install '{_DISTRIBUTION}=={VERSIONS[0]}' 'vllm=={VERSIONS[0].rpartition('.')[0]}.*'"
_FORMAT_SWITCH = "VLLM_ASCEND_ENABLE_NZ"


class NpuAllocator(Protocol):
    """vllm_ascend.device_allocator.camem.CaMemAllocator"""

    pointer_to_data: dict[int, NpuAllocation]


class NpuAllocation(Protocol):
    """vllm_ascend.device_allocator.camem.AllocationData"""

    handle: tuple[int, int, int, int]
    tag: str


@functools.cache
def is_installed() -> bool:
    """Return True if vllm-ascend is installed; it is then vLLM's platform."""
    return importlib.util.find_spec("vllm_ascend") is not None


def prepare(vllm_version: str) -> None:
    """Set the environment of vllm-ascend, before an engine is made.

    Raises:
        UnsupportedError: a version that was not checked, or that is made for another vLLM.
        InvalidInputError: the environment asks for weights in the vendor's order, into which no weight can be synced.
    """
    check_versions(importlib.metadata.version(_DISTRIBUTION), vllm_version)
    if os.environ.setdefault(_FORMAT_SWITCH, "0") != "0":
        raise InvalidInputError(
            f"{_FORMAT_SWITCH}={os.environ[_FORMAT_SWITCH]} keeps weights in the vendor's order (FRACTAL_NZ), into "
            "which no weight can be synced; unset it, or set it to 0"
        )


def check_device(device: Device) -> None:
    """Refuse a device that vLLM cannot use, before vLLM is imported: it would fail later and tell less.

    Raises:
        UnsupportedError: an NPU without vllm-ascend, or vllm-ascend without an NPU; or a simulated device, unless
            ``RLCORE_SIMULATED=1`` asks for that.
    """
    if device.evidence == "simulated" and not Settings.from_env().simulated:
        raise UnsupportedError(
            f"the vllm executor on {device.name}, {device.properties().name}",
            "it is simulated, and vLLM's kernels are not; set RLCORE_SIMULATED=1 to try how far it comes",
        )
    is_npu = device.spec.vllm_plugin == _DISTRIBUTION
    if is_npu and not is_installed():
        raise UnsupportedError(
            f"the vllm executor on {device.name}",
            f"{sys.executable} has no vllm-ascend; in an environment of its own: {_INSTALL}, and there this rlcore; "
            "then build(python=<its bin/python>)",
        )
    if is_installed() and not is_npu:
        raise UnsupportedError(
            f"the vllm executor on {device.name}",
            f"{sys.executable} has vllm-ascend, by which vLLM runs on NPUs only; give build(python=...) another one",
        )


def check_versions(version: str, vllm_version: str) -> None:
    """Check that vllm-ascend is of a known version, and vLLM of the same number.

    Raises:
        UnsupportedError: a version other than ``VERSIONS``, or a vLLM of another number.
    """
    if version not in VERSIONS:
        known = f"the vllm executor was held against {' and '.join(VERSIONS)} alone"
        raise UnsupportedError(f"vllm-ascend {version}", f"{known}; {_INSTALL}")
    if _minor(version) != _minor(vllm_version):
        made_for = f"it is made for vLLM {_minor(version)}"
        raise UnsupportedError(f"vllm-ascend {version} beside vLLM {vllm_version}", made_for)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def allocations(tag: str) -> list[VllmAllocation]:
    """Return the device memory that its allocator has under a tag; addresses stay when it is unmapped."""
    from vllm_ascend.device_allocator.camem import CaMemAllocator  # type: ignore[import-not-found]

    allocator: NpuAllocator = CaMemAllocator.get_instance()
    found: list[Any] = [allocation for allocation in allocator.pointer_to_data.values() if allocation.tag == tag]
    for allocation in found:  # they do not tell if they are mapped; only rlcore unmaps them
        vars(allocation).setdefault("is_asleep", False)
    return found


def set_mapped(allocation: VllmAllocation, is_mapped: bool) -> None:
    """Map memory at the address it had, or give it to the driver."""
    from vllm_ascend.device_allocator.camem import create_and_map, unmap_and_release

    (create_and_map if is_mapped else unmap_and_release)(allocation.handle)
    allocation.is_asleep = not is_mapped


def storage_at(address: int, device: torch.device, nbytes: int) -> Any:
    """Return a storage of memory that it does not own, with the fields that torch_npu's operators need."""
    import torch_npu  # type: ignore[import-not-found]

    return torch_npu._C._construct_storage_from_data_pointer(address, device, nbytes)
