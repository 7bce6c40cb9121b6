"""docs/first_npu_run.sh, the command for the first person with an NPU, and the commands that it and they run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.bench.case import load_cases
from rlcore.registry import registry
from tests.accuracy import assert_within_rounding
from tests.quickstart import learnt_run
from tests.warm import ENGINES, LIMIT_S, run_warm

SCRIPT = Path(__file__).parents[3] / "docs" / "first_npu_run.sh"
SECRET = "hf_Abcdefghijklmnop"
STEPS = 3


def start(folder: Path, *steps: str, **env: str) -> subprocess.Popen[str]:
    settings = {"PYTHON": sys.executable, "DEVICE": "cpu", "RLCORE_RUNTIME": str(folder / "run")}
    return subprocess.Popen(["bash", str(SCRIPT), *steps], cwd=folder, env=os.environ | settings | env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def archive(folder: Path) -> dict[str, bytes]:
    """What is in the one file to send back, by path in its folder."""
    (path,) = folder.glob("rlcore-*.tar.gz")
    with tarfile.open(path) as packed:
        members = [member for member in packed if member.isfile()]
        return {member.name.partition("/")[2]: packed.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def codes(found: dict[str, bytes]) -> dict[str, int]:
    lines = found["steps.txt"].decode().splitlines()
    return {line.partition(":")[0]: int(line.split("exit code ")[1].split(",")[0]) for line in lines if "exit" in line}


@pytest.mark.slow
def test_a_step_that_fails_does_not_lose_the_others_and_no_secret_is_packed(tmp_path: Path) -> None:
    """The path of the model, which its error repeats, has the value of a variable that sounds like a secret."""
    run = start(tmp_path, "npu-smi", "quickstart", "devices", MODEL=f"/nowhere/{SECRET}", HF_TOKEN=SECRET)
    told, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, told
    assert "Please attach rlcore-cpu-" in told
    found = archive(tmp_path)
    assert codes(found) == {"npu-smi": 127, "quickstart": 1, "devices": 0}
    assert b"/nowhere/<HF_TOKEN>" in found["quickstart.txt"]
    assert not [name for name, data in found.items() if SECRET.encode() in data]
    assert json.loads(found["devices.txt"])["name"] == "cpu:0"


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    run = start(tmp_path, "conformance", "packages", LIMIT="0.3")
    told, _ = run.communicate(timeout=LIMIT_S)
    assert codes(archive(tmp_path))["conformance"] == 124, told


@pytest.mark.parametrize(
    ("steps", "env", "words"),
    [
        (("docter",), {}, "there is no step 'docter'; the steps are npu-smi"),
        ((), {"PYTHON": "none"}, "none cannot run rlcore: activate its environment"),
    ],
)
def test_what_cannot_run_is_told_at_once(tmp_path: Path, steps: tuple[str, ...], env: Any, words: str) -> None:
    run = start(tmp_path, *steps, **env)
    told, _ = run.communicate(timeout=LIMIT_S)
    assert (run.returncode, words in told) == (2, True)
    assert not list(tmp_path.glob("rlcore-*"))


def test_the_benchmark_has_a_case_of_every_operator_and_knows_them_all() -> None:
    asked = set(SCRIPT.read_text().partition('cases="')[2].partition('"')[0].split())
    assert asked <= load_cases().keys()
    ours = {op for op, entries in registry().ops.items() if any("rlcore.kernels." in entry.path for entry in entries)}
    wanted = {f"kernels/{op}" for op in (ours | {"token_loss"}) - {"strided_copy"}}  # that one by every weight sync
    assert len(wanted) >= 7 and wanted <= {name.removesuffix("/8b") for name in asked}
    assert {"offload/cycle", "weight_sync/dense", "collectives/all_reduce"} <= asked


# --------------------------------------------------------------------------- over the simulated CANN, or long


@pytest.fixture
def without_cann(_simulated: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """What shows this interpreter the real torch_npu wheel, and nothing of CANN."""
    (packages,) = Path(_simulated["PATH"].split(":")[0]).parent.glob("lib/python*/site-packages")
    (tmp_path / "packages").mkdir()
    for path in (*packages.glob("torch_npu*"), *packages.glob("torchnpugen")):
        (tmp_path / "packages" / path.name).symlink_to(path)
    return {"PYTHONPATH": str(tmp_path / "packages"), "RLCORE_RUNTIME": str(tmp_path / "run")}


@pytest.mark.npu_sim
def test_the_real_wheel_without_cann(without_cann: dict[str, str], run_python: Any) -> None:
    """The newcomer's first hour: torch cannot be imported, and everything of rlcore says why and what to do."""
    cause = "libhccl.so: cannot open shared object file"
    for command in (["devices", "--json"], ["quickstart", "--device", "npu"]):
        result = run_python(["-m", "rlcore", *command], env=without_cann | {"COLUMNS": "2000"})
        told = result.stdout + result.stderr
        assert cause in told and "`rlcore doctor` says what to do" in told and "Traceback" not in told, told
        if "--json" in command:
            assert result.returncode == 0, result.stderr
            (npu,) = [device for device in json.loads(result.stdout)["devices"] if device["name"] == "npu"]
            assert npu["count"] == 0 and "Failed to load the backend extension: torch_npu" in npu["reason"]
    result = run_python(["-m", "rlcore", "doctor", "--json"], env=without_cann)
    assert result.returncode == 1, result.stderr
    checks = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["torch-npu"]["status"] == "OK"
    assert checks["CANN"]["status"] == checks["import torch"]["status"] == "FAIL"
    assert "set_env.sh" in checks["CANN"]["fix"] and "pip uninstall torch-npu" in checks["CANN"]["fix"]
    assert cause in checks["import torch"]["found"] and "torch alone works" in checks["import torch"]["fix"]
    no_back_ends = without_cann | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = run_python("import rlcore; print(rlcore.get_device().name)", env=no_back_ends)
    assert result.stdout == "cpu:0\n", result.stderr


_PLANTED = """
from rlcore.hookspecs import hookimpl
from rlcore.kernels.linear.logprob import linear_logprob_chunked
from rlcore.kernels.returns.scan import gae_scan
from rlcore.kernels.softmax_rows import Logprobs

@hookimpl
def rlcore_register_ops(register):
    for op in ("gae", "linear_logprob"):
        register(op, "*", f"planted:{op}", name="planted", priority=5)

def gae(*arguments, **options):
    return tuple(2 * x for x in gae_scan(*arguments, **options))

def linear_logprob(*arguments):
    found = linear_logprob_chunked(*arguments)
    return Logprobs(2 * found.logprob, found.entropy)
"""


@pytest.mark.slow
def test_a_kernel_with_wrong_results_has_failed(tmp_path: Path) -> None:
    """What a plugin offers is tried as ours are. On the CPU."""
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlcore]\nplanted = planted\n")
    (tmp_path / "planted.py").write_text(_PLANTED)
    told, _ = start(tmp_path, "operators", PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1").communicate(timeout=LIMIT_S)
    found = archive(tmp_path)
    assert codes(found) == {"operators": 1}, told
    lines = found["operators.txt"].decode().splitlines()
    failed = [line.partition(":")[0] for line in lines if "FAILED" in line]
    dtypes = ("torch.float32", "torch.bfloat16")
    assert failed == [f"{op} planted {dtype}" for dtype in dtypes for op in ("linear_logprob", "gae")]
    assert "gae planted torch.float32: FAILED: relative errors 1.0e+00 1.0e+00, not all within 1e-04" in lines
    for name in ("token_logprob", "linear_logprob", "linear_loss"):
        assert any(line.startswith(f"{name} chunked torch.bfloat16: relative errors ") for line in lines)


@pytest.mark.npu_sim
@pytest.mark.timeout(600)
def test_an_interrupt_packs_what_is_done(tmp_path: Path) -> None:
    """Ctrl-C on a terminal goes to the script and to the step."""
    run = start(tmp_path, "packages", "conformance", "operators")
    deadline = time.monotonic() + 250
    while not list(tmp_path.glob("rlcore-*/conformance.txt")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)
    told, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 130, told
    found = archive(tmp_path)
    assert codes(found) == {"packages": 0}
    assert "interrupted during conformance" in found["steps.txt"].decode()
    assert "conformance.txt" in found and "operators.txt" not in found
    assert b"torch==" in found["packages.txt"]


def curve(lines: bytes) -> list[dict[str, float]]:
    return [json.loads(line) for line in lines.decode().splitlines()]


@pytest.mark.npu_sim
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_is_sent_and_the_quickstarts_curve_is_the_cpus(
    _simulated: dict[str, str], made_once: Callable[..., Path], tmp_path: Path
) -> None:
    """The model is the one with which GRPO began on the CPU.

    All steps but the conformance suite, which test_simulated.py runs by the same command, and the benchmark, which
    would first measure for minutes what a simulation can do.
    """
    model = made_once("learnt_run", learnt_run.learn) / "start"
    command = ["-m", "rlcore", "quickstart", "--device", "cpu", "--model", str(model), "--steps", str(STEPS)]
    on_cpu = run_warm([*command, "--output", "on_cpu"], cwd=tmp_path, modules=ENGINES)
    assert on_cpu.returncode == 0, on_cpu.stderr
    wanted = {"packages": 0, "doctor": 0, "devices": 0, "operators": 0, "pair": 0, "quickstart": 0}
    env = {"DEVICE": "npu", "MODEL": str(model), "STEPS": str(STEPS)}
    python = Path(_simulated["PATH"].split(":")[0], "python")
    log = {"CANN_SIM_LOG": str(tmp_path / "cann.log")}
    run = start(tmp_path, *wanted, **(_simulated | log | env | {"PYTHON": str(python)}))
    told, _ = run.communicate(timeout=1400)
    assert run.returncode == 0, told
    found = archive(tmp_path)
    failed = [line for line in found["operators.txt"].decode().splitlines() if "FAILED" in line]
    assert all(" reference " in line and "is not simulated (simulated CANN)" in line for line in failed), failed
    assert codes(found) == wanted | {"operators": int(bool(failed))}, told
    assert json.loads(found["devices.txt"])["properties"]["name"] == "Ascend910B1 (simulated CANN)"
    assert b"linear_loss chunked torch.bfloat16: relative errors" in found["operators.txt"]
    assert b"packed_attention npu_fusion_attention window=64 torch.bfloat16: right" in found["operators.txt"]
    pair = [line for line in found["pair.txt"].decode().splitlines() if line.startswith(("FSDP2", "sync"))]
    assert len(pair) == 4 and "; all within" in pair[0], pair
    assert all("every byte is right" in line for line in pair[1:]), pair
    assert not [name for name in found if name.startswith(("quickstart/model", "quickstart/checkpoint"))]

    npu, cpu = curve(found["quickstart/metrics.jsonl"]), curve((tmp_path / "on_cpu" / "metrics.jsonl").read_bytes())
    rewards = {name: [step["reward"] for step in steps[1:]] for name, steps in (("npu", npu), ("cpu", cpu))}
    print("simulated CANN", rewards, [step["loss"] for step in npu[1:]], [step["loss"] for step in cpu[1:]])
    assert len(npu) == STEPS + 1
    for there, here in zip(*rewards.values(), strict=True):
        assert abs(there - here) * 256 <= 2, "of 256 answers, two fell otherwise"
    alike = 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*rewards.values(), strict=True)))
    losses = [[step["loss"] for step in steps[1:alike]] for steps in (npu, cpu)]  # of the same answers
    assert losses[0]
    # Means of advantages of about 1, times ratios whose log-probabilities went through some thousand roundings.
    options: dict[str, Any] = {"terms": 1000, "magnitude": 1.0, "dtype": torch.float32}
    for there, here in zip(*losses, strict=True):
        assert_within_rounding(there, here, **options, what="loss")
    assert abs(npu[-1]["accuracy"] - cpu[-1]["accuracy"]) * 512 <= 4, "answers"
    assert len(set(rewards["npu"])) > 1
    assert_within_rounding(npu[-1]["parity"], 0.0, **options | {"magnitude": 10.0}, what="of log-probabilities")
