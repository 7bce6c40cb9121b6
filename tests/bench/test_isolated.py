"""A case that hangs, dies or is killed ends alone, is reported as what it did, and the run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_cases import CASES, GROUP, HANGS_S, SLEEP_S
from once import ONCE

from rlcore.bench.case import load_cases
from rlcore.bench.measurement.isolated import Isolated
from rlcore.bench.measurement.measure import Sampling
from rlcore.bench.record import read
from rlcore.bench.run import BenchRun
from rlcore.errors import BenchError

COMMAND = (sys.executable, str(Path(__file__).with_name("faulty_cases.py")))


HEARD: list[str] = []
"""The steps that the child of all tests here has told of."""


@pytest.fixture(scope="module")
def isolated() -> Iterator[Isolated]:
    with Isolated("cpu", COMMAND, on_step=HEARD.append) as found:
        yield found


OUTCOMES = {
    "right": ("pass", ""),
    "wrong": ("fail", "AssertionError: 2 + 2 is 5"),
    "hangs": ("fail", f"it hung: it did not end within {HANGS_S:g} s; it was in _hang (faulty_cases.py:"),
    "killed": ("fail", "its process was killed by SIGKILL"),
    "crashes": ("fail", "its process was killed by SIGSEGV: Fatal Python error: Segmentation fault"),
    "exits": ("fail", "its process ended with exit code 3: the disk is on fire"),
    "exits_well": ("fail", "its process ended with exit code 0"),
    "memory": ("oom", "RuntimeError: "),
    "leaves": ("pass", ""),
    "compute": ("pass", ""),
    "raises": ("fail", "IndexError: list index out of range"),
    "prepares_nothing": ("fail", "TypeError: prepare returned None, which is no bench.case.Work"),
    "repeats_a_name": ("fail", "ValueError: 'x' names two contenders of the same sizes; give each its own name or"),
    "finds_zero": ("fail", "ValueError: the case says that found is 0.0; a record takes positive numbers alone"),
    "finds_nan": ("fail", "ValueError: the case says that found is nan; a record takes positive numbers alone"),
    "no_sizes": ("fail", "what it found is no result: Expected `int | float | str`, got `null` - at `$[0].params"),
    "odd_sizes": ("fail", "its process ended with exit code 1: TypeError: "),
    "cannot_close": ("fail", "its process ended with exit code 1: IndexError: list index out of range"),
}


def test_every_outcome_is_reported_and_the_run_goes_on(isolated: Isolated, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    run = BenchRun(record=isolated.new_record("quick"), path=path, run=lambda case: isolated.run_case(case, ONCE))
    run.cases([CASES[f"faulty/{name}"] for name in OUTCOMES])
    found = {case.name: case for case in read(path).cases}
    for name, (status, reason) in OUTCOMES.items():
        result = found[f"faulty/{name}"]
        assert (result.status, result.reason[: len(reason)]) == (status, reason), result.reason
    wait_until(lambda: sleepers() == [])


def wait_until(condition: Callable[[], bool]) -> None:
    """What was killed may take its time to go."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sleepers() -> list[str]:
    """Return the processes that sleep so long."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "cmdline").read_bytes() == f"sleep\0{SLEEP_S}\0".encode():
                found.append(process.name)
    return found


def test_later_rounds_add_samples_and_a_failure_takes_them_away(isolated: Isolated, tmp_path: Path) -> None:
    seen = []
    run = BenchRun(
        record=isolated.new_record("quick"),
        path=tmp_path / "out.json",
        run=lambda case: isolated.run_case(case, Sampling(min_samples=2, max_samples=2, max_warmup=1)),
        rounds=3,
        report=lambda case, results: seen.append((case.name, results[0].rounds)),
    )
    run.cases([CASES["faulty/right"], CASES["faulty/wrong"]], left_out=[CASES["faulty/slow"]])
    right, wrong, slow = read(tmp_path / "out.json").cases
    assert (right.rounds, len(right.samples("time"))) == ([2, 2, 2], 6)
    assert (wrong.status, wrong.rounds) == ("fail", [])
    assert (slow.status, slow.reason) == ("skipped", "it takes longer than a quick run has")
    assert seen == [
        ("faulty/right", []),
        ("faulty/wrong", []),
        ("faulty/right", [2, 2]),
        ("faulty/right", [2, 2, 2]),
    ]


@pytest.mark.slow
def test_kill_by_the_system_for_want_of_memory_is_oom_and_the_run_goes_on(
    limited_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GROUP, str(limited_group))
    with Isolated("cpu", COMMAND) as isolated:
        (result,) = isolated.run_case(CASES["faulty/hungry"], ONCE)
        assert (result.status, result.reason) == ("oom", "the system ended its process for want of memory")
        assert isolated.run_case(CASES["faulty/killed"], ONCE)[0].status == "fail"
        assert isolated.run_case(CASES["faulty/right"], ONCE)[0].status == "pass"


def test_case_that_the_end_of_the_runs_time_cuts_is_skipped_and_one_that_hangs_fails(isolated: Isolated) -> None:
    slow = dataclasses.replace(CASES["faulty/hangs"], timeout_s=60.0)
    (cut,) = isolated.run_case(slow, ONCE, left_s=0.5)
    assert (cut.status, cut.reason) == ("skipped", "the time that the run had (--within) ended 0 s into it")
    (hung,) = isolated.run_case(CASES["faulty/hangs"], ONCE, left_s=600.0)
    assert hung.status == "fail" and hung.reason.startswith("it hung")


def test_case_of_several_runs_that_is_cut_short_has_those_that_it_made(isolated: Isolated) -> None:
    found = isolated.run_case(CASES["faulty/in_turns"], ONCE, left_s=HANGS_S)
    assert [(result.implementation, result.status) for result in found] == [
        ("ends", "pass"),
        ("hangs", "skipped"),
        ("comes_later", "skipped"),
    ]
    assert len(found[0].samples("time")) == 1 and "cut short: 1 of 3 runs" in found[0].marks
    assert found[1].reason == "the run ended before it had its turn"
    (after,) = isolated.run_case(dataclasses.replace(CASES["faulty/hangs"], timeout_s=60.0), ONCE, left_s=0.5)
    assert after.status == "skipped", "that was the case before"


def test_case_that_crashes_when_it_is_asked_where_it_is_was_late_before(isolated: Isolated) -> None:
    (cut,) = isolated.run_case(CASES["faulty/crashes_when_asked"], ONCE, left_s=1.0)
    assert (cut.status, cut.reason) == ("skipped", "the time that the run had (--within) ended 1 s into it")


def test_case_that_ends_early_has_said_what_it_had_begun(isolated: Isolated) -> None:
    HEARD.clear()
    (killed,) = isolated.run_case(CASES["faulty/in_steps"], ONCE)
    assert [re.sub(r"^\d+ s ", "", step) for step in HEARD] == ["the first thing", "dies", "the second thing"]
    told = f"; it had begun: {', '.join(HEARD)}"
    assert (killed.status, killed.reason) == ("fail", f"its process was killed by SIGKILL{told}")
    slow = dataclasses.replace(CASES["faulty/hangs"], timeout_s=60.0)
    (cut,) = isolated.run_case(slow, ONCE, left_s=0.5)
    assert "begun" not in cut.reason, "that was the case before"


@pytest.mark.slow
def test_child_that_was_killed_is_started_again(isolated: Isolated) -> None:
    assert isolated.run_case(CASES["faulty/right"], ONCE)[0].status == "pass"
    assert isolated._child is not None
    os.kill(isolated._child.pid, signal.SIGKILL)
    (lost,) = isolated.run_case(CASES["faulty/right"], ONCE)
    assert (lost.status, lost.reason) == ("fail", "its process was killed by SIGKILL")
    assert isolated.run_case(CASES["faulty/right"], ONCE)[0].status == "pass"


def test_device_that_cannot_be_described_is_an_error(isolated: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_device_name", "cuda:99")
    with pytest.raises(BenchError, match=r"^cannot describe the device cuda:99"):
        isolated.new_record("quick")


@pytest.mark.gpu
def test_cases_of_a_gpu_run_in_processes_of_their_own_one_after_the_other() -> None:
    with Isolated("cuda") as isolated:
        assert isolated.new_record("quick").system.accelerator_model_name
        assert isolated.calibrate("quick").limits["memory"] > 1e11
        for name in ("memory/bandwidth", "product/sweep", "memory/bandwidth"):
            assert {result.status for result in isolated.run_case(load_cases()[name], ONCE)} == {"pass"}


@pytest.mark.slow
def test_kill_of_the_run_leaves_what_is_done_and_no_process(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import pathlib, test_isolated as t\n"
        "with t.Isolated('cpu', t.COMMAND) as isolated:\n"
        f"    run = t.BenchRun(record=isolated.new_record('quick'), path=pathlib.Path({str(path)!r}),\n"
        "                run=lambda case: isolated.run_case(case, t.ONCE))\n"
        "    run.cases([t.CASES['faulty/right'], t.CASES['faulty/slow'], t.CASES['faulty/hangs']])\n"
    )
    mark = {"FAULTY_CASES_OF": str(path)}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=os.environ | mark) as process:
        deadline = time.monotonic() + 200
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert [(case.name, case.status) for case in read(path).cases] == [("faulty/right", "pass")]
    wait_until(lambda: not _marked(mark))


def _marked(mark: dict[str, str]) -> list[str]:
    """Processes that were started with this variable, and all that those have started."""
    found = []
    ((name, value),) = mark.items()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if f"{name}={value}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found
