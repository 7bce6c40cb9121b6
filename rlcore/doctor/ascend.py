"""Checks of CANN and the NPU driver below torch_npu, from files and variables: no library is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlcore.devices.ascend import versions
from rlcore.doctor.check import CheckVerdict, fail, ok, warn

_SOURCE = (
    "source <where CANN is>/set_env.sh: /usr/local/Ascend/cann/set_env.sh, or before CANN 9 "
    "/usr/local/Ascend/ascend-toolkit/set_env.sh"
)
_NEEDED_FOLDERS = ("runtime", "compiler")
_CANN_OF_TORCH_NPU = {"2.10.0.post4": "9.1.0", "2.11.0": "9.1.0", "2.12.0": "9.1.0", "2.14.0": "9.1.0"}
"""COMPATIBILITY.en.md of Ascend/pytorch (commit b48e648), whose newest row is 2.12.0, and of 2.14.0 the README in its
wheel. No document says it for 2.13.0 and other post releases."""
_DRIVER_FLOORS = {(8, 5): "25.0", (9, 0): "25.0", (9, 1): "25.2"}
"""The oldest driver (Ascend HDK) by CANN's minor version: release notes of CANN 8.5.0 and 9.1.1."""


def cann(installed: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> CheckVerdict:
    """Check CANN: torch_npu loads its libraries at import, and ``import torch`` fails with it."""
    if "torch-npu" not in installed:
        return ok("torch-npu is not installed")
    home = versions.cann_home(environ)
    if home is None:
        return fail(
            "neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set: torch-npu finds no CANN, and import torch fails",
            f"{_SOURCE}; without CANN: pip uninstall torch-npu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        )
    missing = [folder for folder in _NEEDED_FOLDERS if not (home / folder).is_dir()]
    if missing or "ASCEND_OPP_PATH" not in environ:
        lacking = ", ".join([*missing, *([] if "ASCEND_OPP_PATH" in environ else ["ASCEND_OPP_PATH"])])
        return fail(f"{home} lacks {lacking}, which torch-npu asks for at import", _SOURCE)
    found = versions.cann(environ)
    if found is None:
        return warn(f"{home} does not say its version", "install CANN again")
    return _beside_torch_npu(found, installed["torch-npu"])


def _beside_torch_npu(found: versions.Version, torch_npu: str) -> CheckVerdict:
    text, wanted = f"CANN {found}", _CANN_OF_TORCH_NPU.get(torch_npu)
    if wanted is None:
        return _with_ipc(f"{text}; no table says which torch-npu {torch_npu} is for", found, versions.CANN_FOR_IPC)
    if found.minor != versions.Version(wanted).minor:
        return warn(
            f"{text}; torch-npu {torch_npu} is made for CANN {wanted}: operators may be missing or differ",
            f"install CANN {wanted}, toolkit and operator package, and {_SOURCE}",
        )
    return _with_ipc(f"{text}, for which torch-npu {torch_npu} is made", found, versions.CANN_FOR_IPC)


def driver(
    installed: Mapping[str, str],
    path: Path = versions.DRIVER_FILE,
    environ: Mapping[str, str] = os.environ,
) -> CheckVerdict:
    """Check the driver against CANN."""
    if "torch-npu" not in installed:
        return ok("torch-npu is not installed")
    found = versions.driver(path)
    if found is None:
        return warn(f"{path} is not there or says no version", "install the NPU driver; then npu-smi info")
    cann_version = versions.cann(environ)
    floor = _DRIVER_FLOORS.get(cann_version.minor) if cann_version else None
    if floor is not None and found < versions.Version(floor):
        return fail(
            f"driver {found}; CANN {cann_version} runs with {floor} and newer",
            f"install driver and firmware {floor} or newer (npu-smi info shows which there is), or an older CANN",
        )
    return _with_ipc(f"driver {found}", found, versions.DRIVER_FOR_IPC)


def _with_ipc(words: str, found: versions.Version, floor: versions.Version) -> CheckVerdict:
    if found < floor:
        lacking = f"processes share NPU memory from {floor} on, and until then weights go through the host's"
        return warn(f"{words}: {lacking}", f"install {floor} or newer")
    return ok(words)
