"""What the doctor says of an Ascend machine: planted CANN, driver and packages, found as the real ones are."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.doctor import ascend, packages
from rlcore.doctor.packages import TorchBuild
from rlcore.engines.sampling.vllm import ascend as executor
from tests.devices.ascend.test_contract import CLAIMED


def cann(folder: Path, version: str) -> dict[str, str]:
    """The variables that its set_env.sh would set."""
    for name in ("runtime", "compiler"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "ascend_toolkit_install.info").write_text(f"version={version}\n")
    return {"ASCEND_HOME_PATH": str(folder), "ASCEND_OPP_PATH": str(folder)}


def driver(folder: Path, version: str) -> Path:
    (folder / "version.info").write_text(f"Version={version}\n")
    return folder / "version.info"


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """A distribution of which nothing but the metadata is there."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


# ------------------------------------------------------------------------------------------- driver, CANN, torch-npu


@pytest.mark.parametrize(
    ("torch_npu", "installed", "status", "words"),
    [
        ("2.10.0.post4", "9.1.0", "OK", "CANN 9.1.0, for which torch-npu 2.10.0.post4 is made"),
        ("2.14.0", "9.1.1", "OK", "CANN 9.1.1, for which torch-npu 2.14.0 is made"),
        ("2.14.0", "8.5.0", "WARN", "CANN 8.5.0; torch-npu 2.14.0 is made for CANN 9.1.0"),
        ("2.12.0", "9.2.0", "WARN", "CANN 9.2.0; torch-npu 2.12.0 is made for CANN 9.1.0"),
        ("2.13.0", "9.1.0", "OK", "CANN 9.1.0; no table says which torch-npu 2.13.0 is for"),
        ("2.13.0", "8.2.RC1", "WARN", "processes share NPU memory from 8.3.RC1 on"),
    ],
)
def test_cann_and_torch_npu(tmp_path: Path, torch_npu: str, installed: str, status: str, words: str) -> None:
    found = ascend.cann({"torch-npu": torch_npu}, cann(tmp_path, installed))
    assert (found.status, words in found.found) == (status, True), found
    assert status == "OK" or found.fix.startswith("install ")


@pytest.mark.parametrize(
    ("cann_version", "version", "status", "words"),
    [
        ("9.1.0", "26.0.rc1", "OK", "driver 26.0.rc1"),
        ("9.1.1", "25.0.1", "FAIL", "driver 25.0.1; CANN 9.1.1 runs with 25.2 and newer"),
        ("8.5.0", "24.1.0", "FAIL", "driver 24.1.0; CANN 8.5.0 runs with 25.0 and newer"),
        ("9.1.0", "25.2.0", "WARN", "driver 25.2.0: processes share NPU memory from 25.3.rc1 on, and until then"),
        ("8.3.RC1", "24.1.0", "WARN", "processes share NPU memory from 25.3.rc1 on"),
    ],
)
def test_driver_and_cann(tmp_path: Path, cann_version: str, version: str, status: str, words: str) -> None:
    environ = cann(tmp_path / "cann", cann_version)
    found = ascend.driver({"torch-npu": "2.14.0"}, driver(tmp_path, version), environ)
    assert (found.status, words in found.found) == (status, True), found
    assert status == "OK" or found.fix.startswith("install ")


# --------------------------------------------------------------------------------------------------- packages


def test_a_cuda_build_beside_torch_npu_is_told_which_build_to_install() -> None:
    found = packages.torch_npu(TorchBuild("2.13.0", "13.0", None), {"torch-npu": "2.13.0"})
    assert (found.status, found.fix) == ("FAIL", f"{cpu_build('2.13')}, or pip uninstall -y torch-npu")


def cpu_build(minor: str) -> str:
    return f"pip install --force-reinstall 'torch=={minor}.*' --index-url <PyTorch's index of CPU builds>"


@pytest.mark.parametrize(
    ("torch", "npu", "status", "found", "fix"),
    [
        ("2.13.0+cpu", "2.10.0.post4", "FAIL", "2.10.0.post4 is for torch 2.10, not 2.13.0+cpu",
         "pip install 'torch-npu==2.13.0'"),
        ("2.13.0+cpu", "2.6.0", "FAIL", "2.6.0 is for torch 2.6, not 2.13.0+cpu", "pip install 'torch-npu==2.13.0'"),
        ("2.15.0+cpu", "2.13.0", "FAIL", "2.13.0 is for torch 2.13, not 2.15.0+cpu", cpu_build("2.13")),
        ("2.6.0+cpu", "2.6.0", "WARN", "2.6.0; rlcore was held against 2.10.0.post4, 2.13.0, 2.14.0 alone",
         f"{cpu_build('2.14')}, then pip install 'torch-npu==2.14.0'"),
        ("2.13.0+cpu", "2.13.0rc1", "WARN", "2.13.0rc1; rlcore was held against 2.10.0.post4, 2.13.0, 2.14.0 alone",
         "pip install 'torch-npu==2.13.0'"),
        ("2.13.0+cpu", "2.13.0", "OK", "2.13.0", ""),
    ],
)  # fmt: skip
def test_torch_npu_goes_where_torch_is_and_torch_stays_a_cpu_build(
    torch: str, npu: str, status: str, found: str, fix: str
) -> None:
    verdict = packages.torch_npu(TorchBuild(torch, None, None), {"torch-npu": npu})
    assert (verdict.status, verdict.found, verdict.fix) == (status, found, fix)


PAIRS = [(None, "2.10.0.post4"), ("2.9.0+cpu", "2.13.0"), ("2.16.0+cpu", "2.13.0"), ("2.13.0", "2.10.0.post4"),
         ("2.11.0+cpu", "2.11.0"), ("2.6.0+cpu", "2.6.0"), ("2.13.0", "2.13.0")]  # fmt: skip


@pytest.mark.parametrize(("torch", "npu"), PAIRS)
def test_who_follows_the_advice_is_done(torch: str | None, npu: str) -> None:
    """Whichever of the two lines it is taken from: it leads to a pair of which both checks say OK."""
    build = None if torch is None else TorchBuild(torch, None if "+cpu" in torch else "13.0", None)
    for verdict in (packages.torch(build, {"torch-npu": npu}), packages.torch_npu(build, {"torch-npu": npu})):
        if verdict.status == "OK":
            continue
        asked = dict(re.findall(r"'(torch|torch-npu)==([\w.]+)", verdict.fix))
        if "torch" in asked:
            assert "CPU builds" in verdict.fix
            mended = TorchBuild(asked["torch"] + "0+cpu", None, None)
        else:
            assert build is not None
            mended = build
        versions = {"torch-npu": asked.get("torch-npu", npu)}
        assert packages.torch(mended, versions).status == "OK", verdict
        assert packages.torch_npu(mended, versions).status == "OK", verdict


def test_the_versions_of_torch_npu_are_those_that_were_read() -> None:
    assert packages.TORCH_NPU == CLAIMED


@pytest.mark.parametrize("python", [(3, 11), (3, 12)])
def test_where_triton_ascend_has_no_wheel_it_is_not_advised(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int]
) -> None:
    monkeypatch.setattr(sys, "version_info", (*python, 4))
    found = packages.triton({"triton": "3.7.0", "torch-npu": "2.13.0"})
    assert found.status == "WARN"
    assert ("pip install triton-ascend" in found.fix) == (python == (3, 11))
    assert ("Triton for NPUs needs Python 3.9 to 3.11" in found.fix) == (python == (3, 12))
    none = packages.triton({"torch-npu": "2.13.0"})
    assert (none.status, "wheels for Python 3.9 to 3.11" in none.found) == ("OK", python == (3, 12))


PINS = ("torch==2.10.0", "torch-npu==2.10.0.post4", "triton-ascend==3.2.2 ; platform_machine == 'aarch64'", "numpy<3")
RIGHT = {"torch": "2.10.0+cpu", "torch-npu": "2.10.0.post4", "triton-ascend": "3.2.2", "vllm": "0.23.0+empty"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("OK", "0.23.0 beside vLLM 0.23.0+empty", "")),
        ({"vllm": "0.33.0"}, ("FAIL", "is made for vLLM 0.23; there is vLLM 0.33.0", "pip install 'vllm==0.23.*'")),
        ({"vllm": None}, ("FAIL", "is made for vLLM 0.23; there is no vLLM", "pip install 'vllm==0.23.*'")),
        (
            {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"},
            (
                "WARN",
                "asks for torch 2.10.0, not 2.13.0+cpu; torch-npu 2.10.0.post4, not 2.13.0",
                "an environment of its own: pip install vllm-ascend==0.23.0 ",
            ),
        ),
        ({"triton-ascend": None}, ("WARN", "asks for triton-ascend 3.2.2, not none", "an environment of its own")),
    ],
)
def test_vllm_ascend_and_what_it_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    status, words, fix = expected
    install(tmp_path, "vllm-ascend", "0.23.0", *PINS)
    monkeypatch.syspath_prepend(tmp_path)
    versions = {k: v for k, v in (RIGHT | {"vllm-ascend": "0.23.0"} | changed).items() if v}
    found = packages.vllm_ascend(versions)
    assert (found.status, words in found.found, found.fix.startswith(fix)) == (status, True, True), found
    assert packages.vllm(versions).status == "OK", "one line about it is enough"


@pytest.mark.parametrize("version", ["0.11.0", "0.23.0.post1", "0.24.0", "0.26.0", "0.27.0"])
def test_a_vllm_ascend_that_nobody_read(version: str) -> None:
    found = packages.vllm_ascend({"vllm-ascend": version, "vllm": version})
    words = f"{version}; rlcore's executor was held against 0.23.0 and 0.26.0rc1 alone"
    assert (found.status, found.found) == ("WARN", words)
    assert found.fix == "pip install 'vllm-ascend==0.23.0' 'vllm==0.23.*'"
    assert packages.VLLM_ASCEND == executor.VERSIONS


# ----------------------------------------------------------------------------------------- the command as a whole


@pytest.mark.slow
def test_a_machine_that_is_wrong_everywhere(tmp_path: Path, run_python: Any) -> None:
    """Old CANN, both allocator variables, another torch's torch-npu, a vLLM of another number; torch still loads."""
    install(tmp_path, "torch-npu", "2.14.0")
    install(tmp_path, "vllm-ascend", "0.23.0", *PINS)
    install(tmp_path, "vllm", "0.33.0")
    environ = cann(tmp_path / "cann", "8.5.0") | {"PYTHONPATH": str(tmp_path), "RLCORE_RUNTIME": str(tmp_path / "run")}
    environ |= {"RLCORE_PROBE_TIMEOUT_S": "120"}  # for its process of devices, on a busy machine
    both = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    result = run_python(["-m", "rlcore", "doctor", "--json"], env=environ | both)
    assert result.returncode == 1, result.stderr
    checks = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    found = {name: checks[name]["status"] for name in ("torch-npu", "CANN", "vllm", "vllm-ascend", "allocator")}
    assert found == {"torch-npu": "FAIL", "CANN": "WARN", "vllm": "OK", "vllm-ascend": "FAIL", "allocator": "FAIL"}
    assert all(check["fix"] for check in checks.values() if check["status"] != "OK")
    build = packages.torch_build()
    assert build is not None
    assert checks["torch-npu"]["fix"] == packages.torch_npu(build, {"torch-npu": "2.14.0"}).fix
    assert "'torch==2.14.*'" not in checks["torch-npu"]["fix"]
