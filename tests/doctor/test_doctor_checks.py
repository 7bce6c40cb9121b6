"""Each check of the doctor against what it must find: sound, suspicious, broken; with the command that mends it."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import resource
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.bench.measurement.system import PACKAGES
from rlcore.doctor import host, nvidia, packages
from rlcore.doctor.check import CheckVerdict, ok, run_check
from rlcore.doctor.device_process import visible_devices
from rlcore.doctor.packages import TorchBuild
from rlcore.doctor.secrets import SHOWN, shown_environment, without_secrets
from rlcore.process.runtime_folder import runtime_folder
from rlcore.process.status import pid_namespace, start_time
from rlcore.registry import launch
from tests.devices.test_nvml import FakeLibrary

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"

CPU = TorchBuild("2.13.0+cpu", None, None)
CUDA = TorchBuild("2.13.0", "13.0", None)


# ------------------------------------------------------------------------------------------- running a check


def raises() -> CheckVerdict:
    raise KeyError("lost")


def ends() -> CheckVerdict:
    sys.exit("enough")


def hangs() -> CheckVerdict:
    time.sleep(600)
    return ok("never")


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (raises, "KeyError: 'lost'"),
        (ends, "SystemExit: enough"),
        (hangs, "TimeoutError: it did not end within 0.2 s"),
    ],
)
def test_a_check_that_does_not_answer_has_failed(check: Any, found: str) -> None:
    start = time.perf_counter()
    finding = run_check("it", check, timeout_s=0.2 if check is hangs else 300.0)  # the others must answer, however late
    assert time.perf_counter() - start < 300, "the check would take 600"
    assert (finding.check, finding.status, finding.found) == ("it", "FAIL", f"the check itself failed: {found}")


# ----------------------------------------------------------------------------------------------------- host


def test_this_python_is_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.python().status == "OK"
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert host.python() == CheckVerdict("FAIL", host.python().found, "install Python 3.11 or newer")


def test_a_torch_in_a_path_with_a_space_is_noticed(tmp_path: Path) -> None:
    assert packages.path_of_torch(Path("/opt/venv/torch/version.py")) == ok("/opt/venv/torch")
    assert packages.path_of_torch(Path("/home/me/my venv/torch/version.py")) == CheckVerdict(
        "WARN",
        "'/home/me/my venv/torch' has a space in it: torch.compile for the CPU fails in the linker",
        "make the virtual environment in a folder whose path has no space",
    )
    assert packages.path_of_torch().status == ("WARN" if " " in torch.__file__ else "OK")


def test_the_least_python_is_the_one_of_the_package() -> None:
    required = importlib.metadata.metadata("rlcore")["Requires-Python"]
    assert required == f">={'.'.join(map(str, host._LEAST_PYTHON))}"


@pytest.mark.parametrize(("free", "status"), [(64 << 20, "WARN"), (8 << 30, "OK")])
def test_little_shared_memory_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, status: str
) -> None:
    blocks = types.SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_blocks=(16 << 30) // 4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: blocks)
    found = host.shared_memory(tmp_path)
    assert found.status == status
    assert found.found.endswith(" free of 16.0 GiB")
    assert status == "OK" or "docker run --shm-size=16g" in found.fix


def test_absent_shared_memory_fails(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path / "none").status == "FAIL"
    assert "mount -t tmpfs" in host.shared_memory(tmp_path / "none").fix


def test_the_lock_limit_counts_where_there_is_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = (8 << 20, 8 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    assert host.locked_memory(tmp_path / "none") == ok("8 MiB")
    (tmp_path / "mlx5_0").mkdir()
    found = host.locked_memory(tmp_path)
    assert (found.status, "ulimit -l unlimited" in found.fix) == ("WARN", True)
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert host.locked_memory(tmp_path) == ok("unlimited")


@pytest.mark.parametrize(
    ("limits", "status", "fix"),
    [
        ((1024, 524_288), "WARN", "ulimit -n 524288"),
        ((1024, resource.RLIM_INFINITY), "WARN", "ulimit -n 65536"),
        ((65_536, 65_536), "OK", ""),
        (
            (1024, 2048),
            "WARN",
            "as root: prlimit --nofile=65536:65536 --pid $$, or in a container: docker run --ulimit nofile=65536",
        ),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "OK", ""),
    ],
)
def test_few_open_files_are_noticed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], status: str, fix: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    assert (host.open_files().status, host.open_files().fix) == (status, fix)


@pytest.fixture
def dead_process() -> tuple[int, int]:
    """Process id and start time of one that has ended."""
    with subprocess.Popen(["sleep", "600"]) as process:
        started = start_time(process.pid)
        process.kill()
    assert started is not None
    return process.pid, started


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RLCORE_RUNTIME", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


def test_what_living_processes_have_is_no_leftover(runtime: Path, tmp_path: Path) -> None:
    from rlcore.engines.launchers.running import announce
    from rlcore.engines.launchers.runtime_files import new_store

    new_store()
    with runtime_folder() as folder:
        announce(folder, os.getpid(), "cpu:0", ["an engine"])
    (runtime / f"ipc-{os.getpid()}-{start_time(os.getpid())}.sock").touch()
    (runtime / "notes.txt").touch()
    (tmp_path / f"torch_{os.getpid()}_1_0").touch()
    assert host.leftovers(tmp_path) == ok("none")


def test_leftovers_of_dead_processes_are_found(runtime: Path, tmp_path: Path, dead_process: tuple[int, int]) -> None:
    pid, started = dead_process
    (runtime / f"store-{pid_namespace()}-{pid}-{started}-0a1b2c3d").mkdir()
    (runtime / f"ipc-{pid}-{started}.sock").touch()
    (runtime / f"ipc-{os.getpid()}-1.sock").touch()  # this process id, another process
    worker = f'{{"pid":{pid},"started":{started},"parent":1,"device":"cpu:0","engines":[]}}'
    (runtime / f"worker-{pid_namespace()}-{pid}.json").write_text(worker)
    for number in range(3):
        (tmp_path / f"torch_{pid}_12345_{number}").touch()
    found = host.leftovers(tmp_path)
    assert (found.status, found.found.partition(":")[0]) == ("WARN", "7 of dead processes")
    assert found.found.endswith(f".json, torch_{pid}_12345_0 and 2 more")
    subprocess.run(found.fix, shell=True, check=True)
    assert host.leftovers(tmp_path) == ok("none")


def test_shared_memory_of_another_user_is_left_alone(
    runtime: Path, tmp_path: Path, dead_process: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"torch_{dead_process[0]}_1_0").touch()
    (tmp_path / f"torch_{dead_process[0]}_1_1").symlink_to("gone since it was listed")
    monkeypatch.setattr(host, "os", types.SimpleNamespace(getuid=lambda: os.getuid() + 1))
    assert host.leftovers(tmp_path) == ok("none")


def test_the_command_that_removes_leftovers_names_at_most_twenty(
    runtime: Path, tmp_path: Path, dead_process: tuple[int, int]
) -> None:
    """A command line has a limit."""
    for number in range(21):
        (tmp_path / f"torch_{dead_process[0]}_1_{number}").touch()
    found = host.leftovers(tmp_path)
    assert found.found.startswith("21 of dead processes: ") and found.fix.count("torch_") == 20
    assert found.fix.endswith("; rlcore doctor  # for the rest")
    subprocess.run(found.fix.partition(";")[0], shell=True, check=True)
    again = host.leftovers(tmp_path)
    assert again.found.startswith("1 of dead processes: ") and ";" not in again.fix


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({}, "OK", "no variable is set"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "OK", "PYTORCH_ALLOC_CONF=max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "WARN", "cannot open expandable segments"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:1"}, "WARN", "each holds for a part"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_NPU_ALLOC_CONF": "a:1"}, "FAIL", "torch-npu refuses two"),
    ],
)
def test_allocator_settings(environ: dict[str, str], status: str, words: str) -> None:
    found = host.allocator(environ)
    assert found.status == status
    assert words in found.found
    assert status == "OK" or found.fix.startswith("unset PYTORCH_")


# ------------------------------------------------------------------------------------------------- packages


def test_the_build_is_read_without_importing_torch(run_python: Any) -> None:
    code = "import sys; from rlcore.doctor.packages import torch_build; print(torch_build(), 'torch' in sys.modules)"
    import torch

    build = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)
    assert run_python(code).stdout == f"{build} False\n"


@pytest.mark.parametrize(
    ("build", "status", "found"),
    [
        (None, "FAIL", "not installed"),
        (CPU, "OK", "2.13.0+cpu, CPU only"),
        (TorchBuild("2.10.0", None, "7.0"), "OK", "2.10.0, ROCm 7.0"),
        (TorchBuild("2.9.1", "12.8", None), "FAIL", "2.9.1, CUDA 12.8; rlcore needs at least 2.10"),
        (TorchBuild("2.12.0", None, None), "WARN", "2.12.0, CPU only; rlcore was tested with 2.10, 2.11, 2.13, 2.15"),
        (TorchBuild("2.15.0", None, None), "OK", "2.15.0, CPU only"),
        (TorchBuild("2.16.0a0+git", "13.0", None), "WARN", "2.16.0a0+git, CUDA 13.0; rlcore was tested with 2.10, "),
    ],
)
def test_torch_versions(build: TorchBuild | None, status: str, found: str) -> None:
    verdict = packages.torch(build, {})
    assert verdict.status == status
    assert verdict.found.startswith(found)
    assert bool(verdict.fix) == (status != "OK")
    assert "CPU builds" not in verdict.fix


@pytest.mark.parametrize(
    ("build", "version", "status", "words"),
    [
        (CPU, None, "OK", "not installed"),
        (CPU, "2.13.0", "OK", "2.13.0"),
        (CPU, "2.14.0", "FAIL", "2.14.0 is for torch 2.14, not 2.13.0+cpu"),
        (CUDA, "2.13.0.post1", "FAIL", "2.13.0.post1 refuses torch's CUDA 13.0 build"),
    ],
)
def test_torch_npu_and_torch_must_match(build: TorchBuild, version: str | None, status: str, words: str) -> None:
    verdict = packages.torch_npu(build, {"torch-npu": version} if version else {})
    assert (verdict.status, verdict.found) == (status, words)


@pytest.mark.parametrize(
    ("versions", "status", "fix"),
    [
        ({}, "OK", ""),
        ({"triton": "3.7.0"}, "OK", ""),
        ({"triton-ascend": "3.2.0", "torch-npu": "2.13.0"}, "OK", ""),
        ({"triton": "3.7.0", "torch-npu": "2.13.0"}, "WARN", "pip uninstall -y triton, then pip install triton-ascend"),
        ({"triton-ascend": "3.2.0"}, "WARN", "pip uninstall -y triton-ascend, then pip install triton"),
        (
            {"triton": "3.7.0", "triton-ascend": "3.2.0"},
            "FAIL",
            "pip uninstall -y triton triton-ascend, then pip install the one for your device",
        ),
    ],
)  # fmt: skip
def test_only_one_triton(versions: dict[str, str], status: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    verdict = packages.triton(versions)
    assert (verdict.status, verdict.fix) == (status, fix)


@pytest.mark.parametrize(("version", "status"), [(None, "OK"), ("0.19.7", "WARN"), ("0.19.8", "OK"), ("1.0", "OK")])
def test_deepspeed_floor(version: str | None, status: str) -> None:
    verdict = packages.deepspeed({"deepspeed": version} if version else {})
    assert verdict.status == status
    assert status == "OK" or verdict.fix.endswith("pip install --no-build-isolation 'deepspeed>=0.19.8'")


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, "OK"), ("0.25.1", "WARN"), ("0.26.0", "OK"), ("0.33.0", "OK"), ("0.34.0rc1", "WARN"), ("1.0", "WARN")],
)
def test_vllm_range(version: str | None, status: str) -> None:
    verdict = packages.vllm({"vllm": version} if version else {})
    assert verdict.status == status
    assert status == "OK" or verdict.fix == "pip install 'vllm==0.33.*'"


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, "OK"), ("0.5.14", "WARN"), ("0.5.15.post1", "WARN"), ("0.5.21", "OK"), ("0.5.23", "OK"), ("0.6.0", "WARN")],
)
def test_sglang_range(version: str | None, status: str) -> None:
    verdict = packages.sglang({"sglang": version} if version else {})
    assert verdict.status == status
    assert status == "OK" or verdict.fix.endswith("pip install 'sglang==0.5.23'")
    assert ("CVE" in verdict.found) is (version == "0.5.15.post1"), "of a version in the range"


def test_the_page_of_support_claims_the_torch_that_the_doctor_accepts() -> None:
    rows = [line.split("|")[1:3] for line in SUPPORT.read_text().splitlines() if line.startswith("| torch 2")]
    claimed = {
        tuple(map(int, number.split(".")))
        for names, evidence in rows
        if evidence.strip() != "not yet"
        for number in re.findall(r"\b2\.\d+", names)
    }
    assert claimed == set(packages.TORCH)


def test_torch_beside_the_torch_npu_that_asks_for_it_needs_no_other() -> None:
    verdict = packages.torch(TorchBuild("2.14.0+cpu", None, None), {"torch-npu": "2.14.0"})
    assert (verdict.status, verdict.fix) == ("OK", "")
    assert verdict.found == "2.14.0+cpu, CPU only; rlcore was tested with 2.10, 2.11, 2.13, 2.15"


def test_ranges_begin_where_the_package_says() -> None:
    required = importlib.metadata.requires("rlcore") or []
    assert f"torch>={packages.dotted(packages.TORCH[0])}" in required
    assert any(line.startswith(f"vllm>={packages.dotted(packages.VLLM.least)};") for line in required)


# --------------------------------------------------------------------------------------------------- NVIDIA


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the place of nvidia-ml-py: a driver for CUDA 12.8, and three GPUs of which 0 and 2 do not reach each other."""
    fake: Any = FakeLibrary()
    fake.nvmlSystemGetDriverVersion = lambda: "570.1"
    fake.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12_080
    fake.nvmlDeviceGetCount = lambda: 3
    fake.nvmlDeviceGetUUID = lambda gpu: f"GPU-{gpu}"
    fake.nvmlDeviceGetMigMode = lambda gpu: [0, 0]
    fake.nvmlDeviceGetNvLinkState = lambda gpu, link: 0
    nvlink = 2
    fake.nvmlDeviceGetP2PStatus = lambda a, b, what: 0 if (b == 1 if what == nvlink else (a, b) != (0, 2)) else 5
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def proc_file(tmp_path: Path) -> Path:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX 570.1\n")
    return tmp_path / "version"


@pytest.mark.parametrize(
    ("build", "status", "words"),
    [
        (TorchBuild("2.13.0", "12.6", None), "OK", "570.1, for CUDA 12.8 and before; torch has CUDA 12.6"),
        (TorchBuild("2.13.0", "12.9", None), "OK", "torch has CUDA 12.9"),
        (CUDA, "FAIL", "570.1, for CUDA 12.8 and before; torch has CUDA 13.0"),
        (CPU, "WARN", "torch is CPU only"),
        (None, "OK", "570.1"),
    ],
)
def test_the_driver_must_know_torchs_cuda(
    library: Any, proc_file: Path, build: TorchBuild | None, status: str, words: str
) -> None:
    verdict = nvidia.driver(build, proc_file)
    assert verdict.status == status
    assert words in verdict.found
    assert bool(verdict.fix) == (status != "OK")


def test_pairs_without_peer_access_are_named(library: Any, proc_file: Path) -> None:
    verdict = nvidia.peer_access(proc_file)
    assert verdict.status == "WARN"
    assert verdict.found.startswith("3 GPUs, 3 pairs, 1 by NVLink; no peer access between 0-2: ")
    library.nvmlDeviceGetCount = lambda: 1
    assert nvidia.peer_access(proc_file) == ok("1 GPU")


def test_a_driver_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, proc_file: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    verdict = nvidia.driver(CUDA, proc_file)
    assert (verdict.status, verdict.fix) == ("WARN", "pip install 'rlcore[cuda]'")
    assert verdict.found.startswith("NVRM version: NVIDIA UNIX 570.1; ")
    assert nvidia.peer_access(proc_file) == verdict
    for check in (functools.partial(nvidia.driver, CUDA), nvidia.peer_access):
        assert check(proc_file.with_name("none")) == ok("no NVIDIA driver on this machine")


def test_a_driver_that_does_not_answer_fails_with_what_to_do(library: Any, proc_file: Path) -> None:
    library.errors = dict.fromkeys(("nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"), library.NVMLError(15))
    for check in (functools.partial(nvidia.driver, CUDA), nvidia.peer_access):
        verdict = check(proc_file)
        assert verdict.status == "FAIL"
        assert verdict.found.startswith("NVML cannot answer ")
        assert verdict.fix.startswith("nvidia-smi; ")


@pytest.mark.gpu
def test_this_machines_driver_suits_its_torch() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py, of rlcore[cuda], is not installed")
    assert nvidia.driver(packages.torch_build()).status == "OK"
    assert nvidia.peer_access().status in ("OK", "WARN")


# --------------------------------------------------------------------------------- what the environment says


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        (None, "OK", "CUDA_VISIBLE_DEVICES is not set: all"),
        ("4,6", "OK", "CUDA_VISIBLE_DEVICES='4,6'"),
        ("", "WARN", "hides every cuda device"),
        ("4,x,6", "WARN", "CUDA_VISIBLE_DEVICES='4,x,6' ends at 'x', which is no device"),
        ("4,4", "WARN", "hides every cuda device"),
    ],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, value: str | None, status: str, words: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    verdict = visible_devices(launch("cuda"))
    assert verdict.status == status
    assert words in verdict.found


def test_only_listed_variables_are_shown() -> None:
    environ = {"HF_TOKEN": "hf_abcdef", "OMP_NUM_THREADS": "2", "HOME": "/home/someone", "CUDA_LAUNCH_BLOCKING": "1"}
    assert shown_environment(environ) == {"CUDA_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "2"}
    assert host.environment(environ).status == "WARN"
    assert "someone" not in host.environment(environ).found
    assert [name for name in SHOWN if "TOKEN" in name or "PROXY" in name or "KEY" in name] == []


def test_secrets_are_taken_out_of_texts() -> None:
    environ = {"HF_TOKEN": "hf_abcdef", "http_proxy": "http://me:pw123@proxy:1", "MY_PASSWORD": "ab", "LANG": "C.UTF-8"}
    text = "hf_abcdef by http://me:pw123@proxy:1, ssh://you:other@host/x, ab, C.UTF-8, http://host/a@b"
    assert without_secrets(text, environ) == (
        "<HF_TOKEN> by <http_proxy>, ssh://<credentials>@host/x, ab, C.UTF-8, http://host/a@b"
    )


def test_the_versions_that_checks_ask_for_are_looked_up() -> None:
    asked = re.findall(r"versions(?:\.get\(|\[)\"([\w-]+)\"", Path(packages.__file__).read_text())
    assert len(asked) > 3
    assert set(asked) <= {*PACKAGES}
