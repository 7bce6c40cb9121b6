"""What the doctor says of compilers: real ones that are installed, and planted ones that run as programs do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlcore.doctor import cuda_toolkit
from rlcore.doctor.packages import TorchBuild

CUDA = TorchBuild("2.13.0", "13.0", None)
CPU = TorchBuild("2.13.0+cpu", None, None)


def plant(path: Path, *, says: str = "", code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


def version(release: str) -> str:
    return f"Cuda compilation tools, release {release}, V{release}.93"


def test_tritons_own_ptxas_runs() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    found = cuda_toolkit.ptxas(CUDA, {})
    assert (found.status, found.found.endswith(", shipped with triton")) == ("OK", True)
    assert cuda_toolkit.ptxas(CPU, {}).found == "not needed: torch is not built for CUDA"


@pytest.mark.parametrize(
    ("says", "code", "status", "words"),
    [
        (version("13.0"), 0, "OK", "CUDA 13.0, "),
        (version("12.8"), 0, "OK", "CUDA 12.8, "),
        (version("14.1"), 0, "WARN", "CUDA 14.1; torch has CUDA 13.0"),
        ("no version", 0, "FAIL", "does not run: no Triton kernel can be compiled"),
        (version("13.0"), 3, "FAIL", "does not run"),
    ],
)
def test_a_ptxas_of_the_users(tmp_path: Path, says: str, code: int, status: str, words: str) -> None:
    path = plant(tmp_path / "ptxas", says=says, code=code)
    found = cuda_toolkit.ptxas(CUDA, {"TRITON_PTXAS_PATH": str(path)})
    assert (found.status, words in found.found) == (status, True)
    assert found.fix.startswith("unset TRITON_PTXAS_PATH" if status != "OK" else "")


def test_a_ptxas_that_is_not_there_or_may_not_run(tmp_path: Path) -> None:
    missing = cuda_toolkit.ptxas(CUDA, {"TRITON_PTXAS_PATH": str(tmp_path / "none")})
    assert (missing.status, str(tmp_path) in missing.found) == ("FAIL", True)
    plant(tmp_path / "ptxas", says=version("13.0")).chmod(0o644)
    assert cuda_toolkit.ptxas(CUDA, {"TRITON_PTXAS_PATH": str(tmp_path / "ptxas")}).status == "FAIL"


@pytest.mark.parametrize(
    ("release", "build", "status"),
    [("13.2", CUDA, "OK"), ("12.4", CUDA, "WARN"), ("12.4", CPU, "OK"), ("12.4", None, "OK")],
)
def test_nvcc_against_torch(tmp_path: Path, release: str, build: TorchBuild | None, status: str) -> None:
    path = plant(tmp_path / "bin" / "nvcc", says=version(release))
    for environ in ({"CUDA_HOME": str(tmp_path)}, {"CUDA_PATH": str(tmp_path)}, {"PATH": str(path.parent)}):
        found = cuda_toolkit.nvcc(build, environ)
        assert (found.status, found.found.startswith(f"CUDA {release}, {path}")) == (status, True)
        assert status == "OK" or "export CUDA_HOME=<a CUDA 13 toolkit>" in found.fix


def test_no_nvcc_is_needed(tmp_path: Path) -> None:
    assert cuda_toolkit.nvcc(CUDA, {"PATH": str(tmp_path)}).status == "OK"
    broken = cuda_toolkit.nvcc(CUDA, {"CUDA_HOME": str(tmp_path)})
    assert (broken.status, broken.fix) == ("WARN", "unset CUDA_HOME, or let it name a CUDA toolkit")
