"""A case that hangs, dies or is killed ends alone, is reported as what it did, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_cases import CASES, SLEEP_S

from rlcore.bench import isolated as module
from rlcore.bench.case import load_cases
from rlcore.bench.isolated import Isolated
from rlcore.bench.result import read
from rlcore.bench.runner import Run
from rlcore.bench.trial import Sampling
from rlcore.errors import BenchError

ONCE = Sampling(min_samples=1, max_samples=1, max_warmup=1)
COMMAND = (sys.executable, str(Path(__file__).with_name("faulty_cases.py")))


@pytest.fixture(scope="module")
def isolated() -> Iterator[Isolated]:
    with Isolated("cpu", COMMAND) as found:
        yield found


OUTCOMES = {
    "right": ("pass", ""),
    "wrong": ("fail", "AssertionError: 2 + 2 is 5"),
    "hangs": ("fail", "it hung: it did not end within 1 s; it was in _hang (faulty_cases.py:"),
    "killed": ("fail", "its process was killed by SIGKILL"),
    "crashes": ("fail", "its process was killed by SIGSEGV: Fatal Python error: Segmentation fault"),
    "exits": ("fail", "its process ended with exit code 3: the disk is on fire"),
    "memory": ("oom", "RuntimeError: "),
    "leaves": ("pass", ""),
    "compute": ("pass", ""),
}


def test_every_outcome_is_reported_and_the_run_goes_on(isolated: Isolated, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    run = Run(record=isolated.new_record("quick"), path=path, run=lambda case: isolated.run_case(case, ONCE))
    run.cases([CASES[f"faulty/{name}"] for name in OUTCOMES])
    found = {case.name: case for case in read(path).cases}
    for name, (status, reason) in OUTCOMES.items():
        result = found[f"faulty/{name}"]
        assert (result.status, result.reason[: len(reason)]) == (status, reason), result.reason
    assert sleepers() == []


def sleepers() -> list[str]:
    found = subprocess.run(["pgrep", "-f", f"^sleep {SLEEP_S}$"], capture_output=True, text=True, check=False)
    return found.stdout.split()


def test_later_rounds_add_samples_and_a_failure_takes_them_away(isolated: Isolated, tmp_path: Path) -> None:
    seen = []
    run = Run(
        record=isolated.new_record("quick"),
        path=tmp_path / "out.json",
        run=lambda case: isolated.run_case(case, Sampling(min_samples=2, max_samples=2, max_warmup=1)),
        rounds=3,
        report=lambda case, results: seen.append((case.name, results[0].rounds)),
    )
    run.cases([CASES["faulty/right"], CASES["faulty/wrong"]], left_out=[CASES["faulty/slow"]])
    slow, right, wrong = read(tmp_path / "out.json").cases
    assert (right.rounds, len(right.samples("time"))) == ([2, 2, 2], 6)
    assert (wrong.status, wrong.rounds) == ("fail", [])
    assert (slow.status, slow.reason) == ("skipped", "it takes longer than a quick run has")
    assert seen == [
        ("faulty/right", []),
        ("faulty/wrong", []),
        ("faulty/right", [2, 2]),
        ("faulty/right", [2, 2, 2]),
    ]


def test_kill_by_the_system_for_want_of_memory_is_oom(isolated: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([7, 8])
    monkeypatch.setattr(module, "_oom_kills", lambda: next(kills))
    (result,) = isolated.run_case(CASES["faulty/killed"], ONCE)
    assert (result.status, result.reason) == ("oom", "the system ended its process for want of memory")


def test_child_that_was_killed_is_started_again(isolated: Isolated) -> None:
    assert isolated.run_case(CASES["faulty/right"], ONCE)[0].status == "pass"
    assert isolated._child is not None
    os.kill(isolated._child.pid, signal.SIGKILL)
    (lost,) = isolated.run_case(CASES["faulty/right"], ONCE)
    assert (lost.status, lost.reason) == ("fail", "its process was killed by SIGKILL")
    assert isolated.run_case(CASES["faulty/right"], ONCE)[0].status == "pass"


def test_device_that_cannot_be_described_is_an_error() -> None:
    with (
        Isolated("cuda:99", COMMAND) as absent,
        pytest.raises(BenchError, match=r"^cannot describe the device cuda:99"),
    ):
        absent.new_record("quick")


@pytest.mark.gpu
def test_cases_of_a_gpu_run_in_processes_of_their_own_one_after_the_other() -> None:
    with Isolated("cuda") as isolated:
        assert isolated.new_record("quick").system.accelerator_model_name
        assert isolated.calibrate("quick").limits["memory"] > 1e11
        for name in ("memory/bandwidth", "product/sweep", "memory/bandwidth"):
            assert {result.status for result in isolated.run_case(load_cases()[name], ONCE)} == {"pass"}


def test_kill_of_the_run_leaves_what_is_done_and_no_process(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import pathlib, test_isolated as t\n"
        "with t.Isolated('cpu', t.COMMAND) as isolated:\n"
        f"    run = t.Run(record=isolated.new_record('quick'), path=pathlib.Path({str(path)!r}),\n"
        "                run=lambda case: isolated.run_case(case, t.ONCE))\n"
        "    run.cases([t.CASES['faulty/right'], t.CASES['faulty/slow'], t.CASES['faulty/hangs']])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        deadline = time.monotonic() + 200
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert [(case.name, case.status) for case in read(path).cases] == [("faulty/right", "pass")]
    deadline = time.monotonic() + 10
    while (left := _children_of_the_bench()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _children_of_the_bench() -> list[str]:
    """Processes of the command above whose parent has gone."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in found.splitlines() if "faulty_cases.py" in line]
    return [pid for pid, parent, _ in rows if parent == "1"]
