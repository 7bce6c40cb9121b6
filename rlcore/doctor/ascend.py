"""Checks of what torch_npu stands on, CANN and the driver, from files and variables: no library is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlcore.devices.ascend import versions
from rlcore.doctor.finding import Verdict, fail, ok, warn

_SOURCE = "source <where CANN is>/set_env.sh, such as /usr/local/Ascend/ascend-toolkit/set_env.sh"
_NEEDED_FOLDERS = ("runtime", "compiler")


def cann(installed: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Verdict:
    """torch_npu loads its libraries at import, and with it fails ``import torch``."""
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
    return _with_ipc(f"CANN {found}", found, versions.CANN_FOR_IPC)


def driver(installed: Mapping[str, str], path: Path = versions.DRIVER_FILE) -> Verdict:
    if "torch-npu" not in installed:
        return ok("torch-npu is not installed")
    found = versions.driver(path)
    if found is None:
        return warn(f"{path} is not there or says no version", "install the NPU driver; then npu-smi info")
    return _with_ipc(f"driver {found}", found, versions.DRIVER_FOR_IPC)


def _with_ipc(words: str, found: versions.Version, floor: versions.Version) -> Verdict:
    if found < floor:
        return warn(f"{words}: processes share NPU memory from {floor} on", f"install {floor} or newer")
    return ok(words)
