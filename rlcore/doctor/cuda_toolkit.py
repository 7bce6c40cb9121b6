"""Checks of NVIDIA's compilers: ptxas, which every Triton kernel needs, and nvcc, which only extensions need."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rlcore.doctor.check import CheckVerdict, fail, ok, warn
from rlcore.doctor.packages import TorchBuild, dotted

_RELEASE = re.compile(r"\brelease (\d+)\.(\d+)")
_OWN_PTXAS = "TRITON_PTXAS_PATH"
_TIMEOUT_S = 5.0


def ptxas(build: TorchBuild | None, environ: Mapping[str, str] = os.environ) -> CheckVerdict:
    """Check the assembler of Triton's kernels: the one that triton ships, or that the user names."""
    if build is None or build.cuda is None:
        return ok("not needed: torch is not built for CUDA")
    package = importlib.util.find_spec("triton")
    if package is None or package.origin is None:
        return ok("not needed: there is no triton")
    own = environ.get(_OWN_PTXAS)
    path = Path(own) if own else Path(package.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    remedy = f"unset {_OWN_PTXAS}, or name a ptxas that runs" if own else "pip install --force-reinstall triton"
    found = _release(path)
    if found is None:
        return fail(f"{path} does not run: no Triton kernel can be compiled", remedy)
    if found[0] > _major(build.cuda):
        used = f"unset {_OWN_PTXAS}" if own else "pip install the triton that this torch asks for: pip check names it"
        return warn(f"{path}: CUDA {dotted(found)}; torch has CUDA {build.cuda}, for which the driver is", used)
    return ok(f"CUDA {dotted(found)}{f', {path}' if own else ', shipped with triton'}")


def nvcc(build: TorchBuild | None, environ: Mapping[str, str] = os.environ) -> CheckVerdict:
    """Check the compiler that torch would use for an extension, such as flash-attn."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    found_path = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if not found_path:
        return ok("none, and none is needed: only packages that are compiled at their installation ask for it")
    found = _release(Path(found_path))
    if found is None:
        return warn(f"{found_path} does not run", "unset CUDA_HOME, or let it name a CUDA toolkit")
    text = f"CUDA {dotted(found)}, {found_path}"
    if build is None or build.cuda is None or found[0] == _major(build.cuda):
        return ok(text)
    return warn(
        f"{text}; torch has CUDA {build.cuda}, and refuses to compile extensions with another major version",
        f"export CUDA_HOME=<a CUDA {_major(build.cuda)} toolkit> before pip installs what has to be compiled",
    )


def _release(path: Path) -> tuple[int, int] | None:
    """Return the release that ``--version`` prints; None if the program does not run or prints something else."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = _RELEASE.search(said.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _major(version: str) -> int:
    return int(version.partition(".")[0])
