"""The part of a record about where it was made: machine, versions, commit, environment."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from rlcore import __version__
from rlcore.bench.record import SCHEMA, Effort, Record, System
from rlcore.device import Device
from rlcore.errors import DeviceError, MissingDependencyError, UnsupportedError
from rlcore.kernels.tile_choices import tuned
from rlcore.registry import get_device

PACKAGES = (
    "torch", "torch-npu", "triton", "triton-ascend", "numpy", "transformers", "safetensors", "peft", "vllm",
    "vllm-ascend", "flash-attn", "flash-attn-4", "liger-kernel", "trl", "cut-cross-entropy", "verl", "ray",
    "nvidia-ml-py", "pluggy", "msgspec", "sglang", "deepspeed",
)  # fmt: skip
"""Whose versions are recorded where installed."""

ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RLCORE_DEBUG",
    "RLCORE_DEVICE",
    "RLCORE_DISABLE_PLUGINS",
)
"""Variables that are recorded, and the device's visible-devices variable. No other: it may hold a secret."""


def new_record(device: Device, effort: Effort = "standard") -> Record:
    """Return a record without cases. Initialises the device."""
    import torch

    return Record(
        schema=SCHEMA,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        rlcore=__version__,
        commit=source_commit(),
        effort=effort,
        system=describe_system(device),
        dependencies=installed_versions(),
        environment=recorded_environment(device),
        num_threads=torch.get_num_threads(),
        cases=[],
    )


def describe_system(device: Device) -> System:
    import torch

    host = get_device("cpu").properties()
    chip = device.properties()
    is_host = device.spec.is_host
    return System(
        device=device.name,
        accelerators_per_node=0 if is_host else device.count(),
        accelerator_model_name="" if is_host else chip.name,
        accelerator_memory_capacity_bytes=0 if is_host else chip.total_bytes,
        host_processor_model_name=host.name,
        host_processors_per_node=_sockets(),
        host_processor_core_count=host.cores,
        host_memory_capacity_bytes=host.total_bytes,
        operating_system=platform.platform(),
        python=platform.python_version(),
        framework=f"torch {torch.__version__}",
        other_software_stack=_software_stack(device),
    )


def _sockets() -> int:
    return len(set(re.findall(r"^physical id\s*: (\d+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))) or 1


def _software_stack(device: Device) -> dict[str, str]:
    import torch

    found = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    with contextlib.suppress(DeviceError, MissingDependencyError, UnsupportedError):  # it has none, or cannot be asked
        found["driver"] = device.driver_version()
    if not device.spec.is_host and (tiles := tuned(device.properties().name)) is not None:
        found["tiles"] = "; ".join(f"{name}: {chosen}" for name, chosen in tiles.tiles.items())
    return {name: version for name, version in found.items() if version}


def installed_versions() -> dict[str, str]:
    """Return versions from package metadata; imports none of the packages."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def recorded_environment(device: Device) -> dict[str, str]:
    names = (*ENVIRONMENT, device.spec.visible_devices_variable or "")
    return {name: os.environ[name] for name in names if name in os.environ}


def source_commit() -> str | None:
    """Return the commit of the git checkout that this file is tracked in; None when there is none."""
    here = Path(__file__).resolve()
    # Installed into a virtual environment inside somebody's repository, this file is in no commit of it.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-modified" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
