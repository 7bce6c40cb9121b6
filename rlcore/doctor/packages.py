"""Checks of installed packages by their metadata. No package is imported, so a broken one cannot break a check."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcore.doctor.check import CheckVerdict, fail, ok, warn
from rlcore.engines.deepspeed.library import INSTALL, LEAST_VERSION, is_new_enough


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The content of torch/version.py."""

    version: str
    cuda: str | None
    hip: str | None

    @property
    def kind(self) -> str:
        if self.cuda:
            return f"CUDA {self.cuda}"
        return f"ROCm {self.hip}" if self.hip else "CPU only"


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The least and the newest version of a package that rlcore accepts: two numbers of it, or three."""

    least: tuple[int, ...]
    newest: tuple[int, ...]


TORCH = ((2, 10), (2, 11), (2, 13), (2, 15))
"""The minor versions that the tests have run with, as docs/support.md says; the first is the floor."""
TORCH_NPU = ("2.10.0.post4", "2.13.0", "2.14.0")
"""Not a range: the parts that rlcore uses were compared with these versions only."""
VLLM = VersionRange((0, 26), (0, 33))
SGLANG = VersionRange((0, 5, 15), (0, 5, 23))
SGLANG_ADVISED = (0, 5, 20)
"""The newest with CVE-2026-86793 and CVE-2026-93034: it unpickles what reaches its server or its sockets."""
VLLM_ASCEND = ("0.23.0", "0.26.0rc1")
"""Not a range: rlcore's executor was compared with these versions only."""
_TRITON_ASCEND_PYTHON = (3, 11)
"""The newest for which triton-ascend 3.2.0, the newest on PyPI, has a wheel."""


def torch_version_file() -> Path | None:
    """Return the path of version.py of the torch that would be imported; None when there is none."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")


def path_of_torch(file: Path | None = None) -> CheckVerdict:
    """Check the path of torch for spaces: torch.compile passes it to the host's compiler without quotes."""
    found = file or torch_version_file()
    if found is None:
        return ok("there is no torch")
    if any(map(str.isspace, str(found.parent))):
        return warn(
            f"{str(found.parent)!r} has a space in it: torch.compile for the CPU fails in the linker",
            "make the virtual environment in a folder whose path has no space",
        )
    return ok(str(found.parent))


def torch_build() -> TorchBuild | None:
    """Return the build of the torch that would be imported; None when there is none, or a half-installed one."""
    file = torch_version_file()
    if file is None:
        return None
    try:
        said = runpy.run_path(str(file))
        return TorchBuild(said["__version__"], said.get("cuda"), said.get("hip"))
    except Exception:  # an interrupted installation can leave anything there
        return None


def torch(build: TorchBuild | None, versions: Mapping[str, str], file: Path | None = None) -> CheckVerdict:
    for_npu = _pair(build, versions["torch-npu"]) if "torch-npu" in versions else ""
    if build is None and file is not None:
        reinstall = for_npu or "pip install --force-reinstall torch"
        return fail(f"installed by half: {file} is missing, or does not say its version", reinstall)
    if build is None:
        return fail("not installed", for_npu or "pip install torch")
    found, release = f"{build.version}, {build.kind}", _release(build.version)
    if release < TORCH[0]:
        return fail(f"{found}; rlcore needs at least {dotted(TORCH[0])}", for_npu or "pip install --upgrade torch")
    if release in TORCH:
        return ok(found)
    text = f"{found}; rlcore was tested with {', '.join(map(dotted, TORCH))}"
    if "torch-npu" in versions and not for_npu:  # which asks for this torch
        return ok(text)
    return warn(text, for_npu or f"pip install 'torch=={dotted(TORCH[-1])}.*'")


def torch_npu(build: TorchBuild | None, versions: Mapping[str, str]) -> CheckVerdict:
    """Check torch-npu, which is built for one minor version of torch, and for torch's CPU build."""
    npu = versions.get("torch-npu")
    if npu is None or build is None:
        return ok(npu or "not installed")
    fix = _pair(build, npu)
    if _release(npu) != _release(build.version):
        return fail(f"{npu} is for torch {dotted(_release(npu))}, not {build.version}", fix)
    if build.kind != "CPU only":
        return fail(f"{npu} refuses torch's {build.kind} build", f"{fix}, or pip uninstall -y torch-npu")
    if npu not in TORCH_NPU:
        return warn(f"{npu}; rlcore was held against {', '.join(TORCH_NPU)} alone", fix)
    return ok(npu)


def _pair(build: TorchBuild | None, npu: str) -> str:
    """Return the commands that install a matching torch and torch-npu, "" if none; torch stays where possible.

    PyPI's torch for x86-64 is a CUDA build.
    """
    by_torch = {_release(known): known for known in TORCH_NPU}
    torch_now = _release(build.version) if build else None
    kept = by_torch.get(torch_now) if torch_now else None
    wanted = kept or (npu if npu in TORCH_NPU else TORCH_NPU[-1])
    steps = []
    if build is None or build.kind != "CPU only" or torch_now != _release(wanted):
        minor = dotted(_release(wanted))
        steps.append(f"pip install --force-reinstall 'torch=={minor}.*' --index-url <PyTorch's index of CPU builds>")
    if npu != wanted:
        steps.append(f"pip install 'torch-npu=={wanted}'")
    return ", then ".join(steps)


def torch_back_ends() -> list[str]:
    """Return the distributions whose code ``import torch`` runs: entry points of torch.backends."""
    found = importlib.metadata.entry_points(group="torch.backends")
    return sorted({entry.dist.name if entry.dist else entry.name for entry in found})


def triton(versions: Mapping[str, str]) -> CheckVerdict:
    """Check Triton: triton and triton-ascend both install a package called ``triton``."""
    both = {name: versions[name] for name in ("triton", "triton-ascend") if name in versions}
    found = ", ".join(f"{name} {version}" for name, version in both.items())
    if len(both) == 2:
        return fail(
            f"{found}: one has overwritten files of the other",
            "pip uninstall -y triton triton-ascend, then pip install the one for your device",
        )
    is_for_npu = "torch-npu" in versions
    is_too_new = sys.version_info[:2] > _TRITON_ASCEND_PYTHON
    newest = ".".join(map(str, _TRITON_ASCEND_PYTHON))
    if not both:
        why = f": triton-ascend has wheels for Python 3.9 to {newest}" if is_for_npu and is_too_new else ""
        return ok(f"not installed: operators run without it{why}")
    wanted = "triton-ascend" if is_for_npu else "triton"
    if wanted in both:
        return ok(found)
    (other,) = both
    if is_for_npu and is_too_new:
        return warn(
            f"{found} builds nothing for this torch",
            f"pip uninstall -y {other}: operators run without it. Triton for NPUs needs Python 3.9 to {newest}, for "
            "which triton-ascend has wheels",
        )
    return warn(f"{found} builds nothing for this torch", f"pip uninstall -y {other}, then pip install {wanted}")


def deepspeed(versions: Mapping[str, str]) -> CheckVerdict:
    version = versions.get("deepspeed")
    if version is None or is_new_enough(version):
        return ok(version or "not installed")
    least = ".".join(map(str, LEAST_VERSION))
    return warn(f"{version}; the train executor needs at least {least}", f"{INSTALL} 'deepspeed>={least}'")


def vllm(versions: Mapping[str, str]) -> CheckVerdict:
    version = versions.get("vllm")
    if version is None:
        return ok("not installed")
    if "vllm-ascend" in versions:
        return ok(f"{version}; vllm-ascend decides which it must be")
    if VLLM.least <= _release(version) <= VLLM.newest:
        return ok(version)
    known = f"{dotted(VLLM.least)} to {dotted(VLLM.newest)}"
    return warn(f"{version}; rlcore knows {known}", f"pip install 'vllm=={dotted(VLLM.newest)}.*'")


def sglang(versions: Mapping[str, str]) -> CheckVerdict:
    version = versions.get("sglang")
    if version is None:
        return ok("not installed")
    release = _release(version, 3)
    newest = f"pip install 'sglang=={dotted(SGLANG.newest)}'"
    if not SGLANG.least <= release <= SGLANG.newest:
        return warn(f"{version}; rlcore knows {dotted(SGLANG.least)} to {dotted(SGLANG.newest)}", newest)
    if release <= SGLANG_ADVISED:
        return warn(
            f"{version} unpickles what reaches its server (CVE-2026-86793, CVE-2026-93034); rlcore starts none, and "
            "its sockets are in a folder of this user's",
            f"start no server of it on an open port, or {newest}",
        )
    return ok(version)


def vllm_ascend(versions: Mapping[str, str]) -> CheckVerdict:
    """Check vllm-ascend, which needs the vLLM of its own number, and pins torch, torch-npu and triton-ascend."""
    version = versions.get("vllm-ascend")
    if version is None:
        return ok("not installed")
    number = dotted(_release(version))
    if version not in VLLM_ASCEND:
        read = VLLM_ASCEND[0]
        fix = f"pip install 'vllm-ascend=={read}' 'vllm=={dotted(_release(read))}.*'"
        return warn(f"{version}; rlcore's executor was held against {' and '.join(VLLM_ASCEND)} alone", fix)
    beside = versions.get("vllm")
    if beside is None or _release(beside) != _release(version):
        there = f"vLLM {beside}" if beside else "no vLLM"
        return fail(f"{version} is made for vLLM {number}; there is {there}", f"pip install 'vllm=={number}.*'")
    wrong = [f"{name} {wanted}, not {versions.get(name, 'none')}" for name, wanted in _pins("vllm-ascend").items()
             if versions.get(name, "").partition("+")[0] != wanted]  # fmt: skip
    if wrong:
        return warn(
            f"{version} asks for {'; '.join(wrong)}",
            f"an environment of its own: pip install vllm-ascend=={version} vllm=={beside}; then "
            "infer.build(python=<its bin/python>)",
        )
    return ok(f"{version} beside vLLM {beside}")


def _pins(distribution: str) -> dict[str, str]:
    """Return name -> version of the packages that a distribution pins, from its metadata."""
    lines = importlib.metadata.requires(distribution) or []
    found = (re.match(r"(torch|torch[-_]npu|triton[-_]ascend)\s*\(?==\s*([\w.]+)", line) for line in lines)
    return {one[1].replace("_", "-"): one[2] for one in found if one}


def _release(version: str, count: int = 2) -> tuple[int, ...]:
    """Return the first numbers of a version."""
    parts = re.match(r"(\d+)" + r"\.(\d+)" * (count - 1), version)
    if parts is None:
        raise ValueError(f"{version!r} is no version")
    return tuple(map(int, parts.groups()))


def dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
