"""All checks. Those of the machine run here; those that could crash run in a child process (device_process.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal

from rlcore import __version__
from rlcore.bench.measurement.system import installed_versions
from rlcore.deadline import call_within
from rlcore.doctor import ascend, cuda_toolkit, host, nvidia, packages
from rlcore.doctor.check import CheckResult, Status, run_check
from rlcore.doctor.secrets import without_secrets
from rlcore.process.python_command import python_command
from rlcore.settings import Settings

_DEVICES_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 2.0
_ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception|Exit|Warning)\b.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The result of ``rlcore doctor``."""

    schema: Literal["rlcore.doctor/1"] = "rlcore.doctor/1"
    rlcore: str
    status: Status
    """The worst status of the checks."""
    seconds: float
    checks: tuple[CheckResult, ...]


def examine() -> DoctorReport:
    """Run every check. A check that raises or hangs has failed; the error is its result."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process, findings = _start(errors)
        checks = [*_checks_here(), *_collect(process, findings, errors)]
    shown = tuple(_safe(finding) for finding in checks)
    levels: tuple[Status, ...] = ("FAIL", "WARN", "OK")
    worst = next(level for level in levels if any(finding.status == level for finding in shown))
    return DoctorReport(rlcore=__version__, status=worst, seconds=round(time.perf_counter() - start, 1), checks=shown)


def _checks_here() -> Iterator[CheckResult]:
    build, versions = packages.torch_build(), installed_versions()
    yield run_check("python", host.python)
    yield run_check("path of torch", packages.path_of_torch)
    yield run_check("torch", packages.torch, build, versions, packages.torch_version_file())
    yield run_check("torch-npu", packages.torch_npu, build, versions)
    yield run_check("CANN", ascend.cann, versions)
    yield run_check("NPU driver", ascend.driver, versions)
    yield run_check("triton", packages.triton, versions)
    yield run_check("deepspeed", packages.deepspeed, versions)
    yield run_check("vllm", packages.vllm, versions)
    yield run_check("vllm-ascend", packages.vllm_ascend, versions)
    yield run_check("sglang", packages.sglang, versions)
    yield run_check("driver", nvidia.driver, build)
    yield run_check("ptxas", cuda_toolkit.ptxas, build)
    yield run_check("nvcc", cuda_toolkit.nvcc, build)
    yield run_check("peer access", nvidia.peer_access)
    yield run_check("shared memory", host.shared_memory)
    yield run_check("locked memory", host.locked_memory)
    yield run_check("open files", host.open_files)
    yield run_check("leftovers", host.leftovers)
    yield run_check("allocator", host.allocator)
    yield run_check("environment", host.environment)


# -------------------------------------------------------------------------------------- the process of devices


def _start(errors: IO[str]) -> tuple[subprocess.Popen[bytes], IO[str]]:
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        python_command("rlcore.doctor.device_process:main", theirs),
        # The strict mode would end it at the first broken plugin; the doctor reports all of them.
        env=os.environ | {"RLCORE_STRICT_PLUGINS": "0"},
        pass_fds=(theirs,),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        start_new_session=True,
    )
    os.close(theirs)
    return process, os.fdopen(ours)


def _collect(process: subprocess.Popen[bytes], lines: IO[str], errors: IO[str]) -> list[CheckResult]:
    found: list[CheckResult] = []
    begun: list[str] = []
    timeout_s = _DEVICES_TIMEOUT_S + Settings.from_env().probe_timeout_s
    try:
        is_whole = call_within(timeout_s, _read, lines, begun, found)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)  # a plugin's thread may keep it alive, but its report is complete
        how = _how_it_ended(process, errors)
    except TimeoutError:
        is_whole, how = False, f"did not end within {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # this process, and the one that it shared memory with
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if is_whole:
        return found
    if not found:
        return [_torch_without_back_ends(how)]
    fix = "RLCORE_DISABLE_PLUGINS=all rlcore doctor, to see whether a plugin does it"
    return [
        *found,
        CheckResult(begun[-1], "FAIL", f"the process of this check {how}; nothing after it was checked", fix),
    ]


def _read(lines: IO[str], begun: list[str], found: list[CheckResult]) -> bool:
    """Read the reports of the process. Returns True if they are complete."""
    for line in lines:
        entry = json.loads(line)
        if entry is None:
            return True
        if isinstance(entry, str):
            begun.append(entry)
        else:
            found.append(CheckResult(**entry))
    return False


def _how_it_ended(process: subprocess.Popen[bytes], errors: IO[str]) -> str:
    code = process.poll()
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    errors.seek(0)
    said = [line.strip() for line in errors if _ERROR_LINE.match(line)]
    if not said:
        return f"ended with exit code {code}"
    cause = f" (caused by {said[0]})" if said[0] != said[-1] else ""
    return f"failed: {said[-1]}{cause}"


def _torch_without_back_ends(how: str) -> CheckResult:
    """Find out why ``import torch`` fails, by importing it without the back ends that it loads."""
    command = [sys.executable, "-c", "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import torch"]
    try:
        alone = subprocess.run(
            [*command, json.dumps(sys.path)],
            env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            capture_output=True,
            timeout=_DEVICES_TIMEOUT_S,
            check=False,
        )
        works = alone.returncode == 0
    except subprocess.TimeoutExpired:
        works = False
    found = f"it {how}. No device was checked"
    back_ends = packages.torch_back_ends()
    if not works or not back_ends:
        return CheckResult("import torch", "FAIL", found, "pip install --force-reinstall torch")
    advice = (
        f"torch alone works, a back end that it loads does not: install what {', '.join(back_ends)} needs (torch-npu: "
        f"CANN, and source its set_env.sh), or pip uninstall {' '.join(back_ends)}; meanwhile "
        "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )
    return CheckResult("import torch", "FAIL", found, advice)


def _safe(finding: CheckResult) -> CheckResult:
    found, fix = (without_secrets(text, os.environ) for text in (finding.found, finding.fix))
    return CheckResult(finding.check, finding.status, found, fix)
