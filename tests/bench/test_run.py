"""What is done is on disk; what is interrupted or left out is said; later rounds add to the earlier."""

from __future__ import annotations

import dataclasses
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlcore.bench.case import Case
from rlcore.bench.measurement.system import new_record
from rlcore.bench.record import CaseResult, Metric, Telemetry, read
from rlcore.bench.run import PLANS, BenchRun, continued, noted
from rlcore.errors import BenchError
from rlcore.registry import get_device


def case(name: str) -> Case:
    return Case(name=name, description="", prepare=lambda device: None)


def passed(name: str, *samples: float, share: float = 0.0, **options: Any) -> CaseResult:
    metrics = [Metric(name=kind, unit="s", samples=list(samples)) for kind in ("time", "first_run")]
    telemetry = Telemetry(host_share_of_others=share)
    options = {"implementation": "x", "params": {}, "telemetry": telemetry} | options
    return CaseResult(name=name, status="pass", metrics=metrics, **options)


def a_run(path: Path, run: Any, **options: Any) -> BenchRun:
    return BenchRun(record=new_record(get_device("cpu")), path=path, run=run, **options)


def test_each_case_is_on_disk_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    on_disk, reported = [], []

    def run(case: Case) -> list[CaseResult]:
        on_disk.append([found.name for found in read(path).cases] if path.exists() else None)
        return [passed(case.name, 1.0)]

    record = a_run(path, run, report=lambda case, results: reported.extend(results)).cases([*map(case, "abc")])
    assert on_disk == [None, ["a"], ["a", "b"]]
    assert read(path) == record
    assert reported == record.cases


def test_interruption_keeps_what_is_done_and_marks_the_rest(tmp_path: Path) -> None:
    def run(case: Case) -> list[CaseResult]:
        if case.name == "b":
            raise KeyboardInterrupt
        return [passed(case.name, 1.0)]

    with pytest.raises(KeyboardInterrupt):
        a_run(tmp_path / "out.json", run).cases([*map(case, "abc")])
    found = [(case.name, case.status, case.reason) for case in read(tmp_path / "out.json").cases]
    skipped = ("skipped", "the run was interrupted")
    assert found == [("a", "pass", ""), ("b", *skipped), ("c", *skipped)]


def test_interrupted_case_keeps_the_runs_that_it_made_and_is_run_again(tmp_path: Path) -> None:
    def run(case: Case) -> list[CaseResult]:
        raise KeyboardInterrupt

    def so_far(case: Case) -> list[CaseResult]:
        return [msgspec.structs.replace(passed(case.name, 1.0), marks=["cut short: 1 of 3 runs"])]

    with pytest.raises(KeyboardInterrupt):
        a_run(tmp_path / "out.json", run, so_far=so_far).cases([case("a"), case("b")])
    record = read(tmp_path / "out.json")
    assert [(case.name, case.status) for case in record.cases] == [("a", "pass"), ("b", "skipped")]
    again = BenchRun(record=record, path=tmp_path / "out.json", run=lambda case: [passed(case.name, 2.0)])
    assert [case.samples("time") for case in again.cases([case("a"), case("b")]).cases] == [[2.0], [2.0]]


def test_interruption_in_a_later_round_keeps_the_earlier_ones(tmp_path: Path) -> None:
    answers = iter([[passed("a", 1.0)], [passed("b", 2.0)], KeyboardInterrupt()])

    def run(case: Case) -> list[CaseResult]:
        if isinstance(answer := next(answers), KeyboardInterrupt):
            raise answer
        return answer

    with pytest.raises(KeyboardInterrupt):
        a_run(tmp_path / "out.json", run, rounds=3).cases([case("a"), case("b")])
    assert [case.samples("time") for case in read(tmp_path / "out.json").cases] == [[1.0], [2.0]]


def test_full_disk_ends_the_run_and_what_was_done_survives(tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    def run(case: Case) -> list[CaseResult]:
        return [passed(case.name, *([1.0] * (100_000 if case.name == "c" else 10)))]

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(BenchError, match=r"cannot write the benchmark record .*out\.json: File too large"):
            a_run(path, run).cases([*map(case, "abc")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [found.name for found in read(path).cases] == ["a", "b"]


FULL_DISK = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_run as t
from rlcore.bench.record import read
path = Path({folder!r}, "out.json")
try:
    t.a_run(path, lambda case: [t.passed(case.name, *[0.123456789] * 2000)]).cases([*map(t.case, "abcdefgh")])
except t.BenchError as error:
    print([found.name for found in read(path).cases], sorted(one.name for one in path.parent.iterdir()), error)
"""


@pytest.mark.slow
def test_disk_that_fills_up_ends_the_run_and_what_was_done_survives(tmp_path: Path) -> None:
    """On a file system of 256 KiB, mounted where no other process sees it."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"
    if subprocess.run([*alone, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("needs a user namespace in which a small file system can be mounted (unshare --user --mount)")
    code = FULL_DISK.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    shell = [*alone, "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=250, check=True)
    names, files, message = re.fullmatch(r"(\[.*?\]) (\[.*?\]) (.*)\n", done.stdout).groups()  # type: ignore[union-attr]
    assert names in ("['a']", "['a', 'b']", "['a', 'b', 'c']") and files == "['out.json']"
    assert message == f"cannot write the benchmark record {tmp_path / 'out.json'}: No space left on device"


def test_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot write the benchmark record .*: no folder .*nowhere that can be"):
        a_run(tmp_path / "nowhere" / "out.json", None)


# ---------------------------------------------------------------------------------------------------- rounds


def rounds(tmp_path: Path, *answers: list[CaseResult]) -> list[CaseResult]:
    left = iter(answers)
    return a_run(tmp_path / "out.json", lambda case: next(left), rounds=len(answers)).cases([case("a")]).cases


def test_rounds_are_joined_and_their_sizes_kept(tmp_path: Path) -> None:
    (joined,) = rounds(tmp_path, [passed("a", 1.0, 2.0)], [passed("a", 3.0)], [passed("a", 4.0, 5.0, share=0.5)])
    assert (joined.samples("time"), joined.rounds) == ([1.0, 2.0, 3.0, 4.0, 5.0], [2, 1, 2])
    assert joined.telemetry is not None and joined.telemetry.host_share_of_others == 0.5
    assert joined.marks == ["shared: others used the host's processors"]


def test_failure_in_a_later_round_leaves_no_number(tmp_path: Path) -> None:
    failed = CaseResult(name="a", implementation="x", status="fail", params={}, reason="wrong")
    assert rounds(tmp_path, [passed("a", 1.0)], [failed], [passed("a", 1.0)]) == [failed]
    whole = CaseResult(name="a", implementation="", status="fail", params={}, reason="it hung")
    assert rounds(tmp_path, [passed("a", 1.0), passed("a", 2.0, implementation="y")], [whole]) == [whole]


def test_what_states_its_number_of_runs_is_not_repeated(tmp_path: Path) -> None:
    times = Metric(name="time", unit="s", samples=[1.0])
    once = CaseResult(name="a", implementation="x", status="pass", params={}, metrics=[times])
    assert rounds(tmp_path, [once], [passed("a", 9.0)]) == [once]


# ------------------------------------------------------------------------------------------------- going on


def call_again(path: Path, names: str, answers: Any, *, rounds: int = 1, commit: str = "a" * 40) -> list[CaseResult]:
    """As a call of ``rlcore bench run --continue`` at ``commit``."""
    now = msgspec.structs.replace(new_record(get_device("cpu")), commit=commit)
    record = continued(read(path), now) if path.exists() else now
    return (
        BenchRun(record=record, path=path, run=lambda case: answers(case.name), rounds=rounds)
        .cases([*map(case, names)])
        .cases
    )


def test_continued_run_keeps_what_has_a_number_and_runs_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    ran: list[str] = []

    def first(name: str) -> list[CaseResult]:
        statuses: Any = {"b": "fail", "c": "blocked"}
        if name == "d":
            raise KeyboardInterrupt
        failed = CaseResult(name=name, implementation="", status=statuses.get(name, "oom"), params={}, reason="x")
        return [passed(name, 1.0)] if name == "a" else [failed]

    def second(name: str) -> list[CaseResult]:
        ran.append(name)
        return [passed(name, 2.0)]

    with pytest.raises(KeyboardInterrupt):
        call_again(path, "abcde", first)
    found = {one.name: one for one in call_again(path, "abcdef", second)}
    assert ran == ["b", "d", "e", "f"]
    assert (found["a"].samples("time"), found["c"].status, found["b"].samples("time")) == ([1.0], "blocked", [2.0])
    assert [sorted(call.rounds) for call in read(path).calls] == [["a", "b", "c"], ["b", "d", "e", "f"]]


def test_notes_are_gathered_and_keep_no_run_from_going_on() -> None:
    first = noted(new_record(get_device("cpu")), "three other jobs")
    assert first.system.hw_notes == "three other jobs"
    now = new_record(get_device("cpu"))
    again = continued(first, noted(now, None))
    assert again.system.hw_notes == continued(first, first).system.hw_notes == "three other jobs"
    assert continued(first, noted(now, "now alone")).system.hw_notes == "three other jobs; now alone"


def test_continued_run_adds_rounds_of_the_same_commit_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    call_again(path, "a", lambda name: [passed(name, 1.0)])
    (same,) = call_again(path, "a", lambda name: [passed(name, 2.0)], rounds=3)
    assert (same.samples("time"), same.rounds) == ([1.0, 2.0, 2.0], [1, 1, 1])
    other = {one.name: one for one in call_again(path, "ab", lambda name: [passed(name, 3.0)], rounds=5, commit="b")}
    assert (other["a"], other["b"].rounds) == (same, [1] * 5)
    assert read(path).commits() == f"{'a' * 12}, b"
    changed = call_again(path, "b", lambda name: [passed(name, 4.0)], rounds=9, commit="b-modified")
    assert changed[1].rounds == [1] * 5  # nobody knows what was changed
    again = continued(read(path), msgspec.structs.replace(new_record(get_device("cpu")), commit="b-modified"))
    assert BenchRun(record=again, path=path, run=lambda case: []).settled == {"a", "b"}


def test_nothing_is_added_to_what_uncommitted_code_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for rounds in (1, 3):
        (found,) = call_again(path, "a", lambda name: [passed(name, 1.0)], rounds=rounds, commit="a-modified")
        assert found.samples("time") == [1.0], "the code may have changed meanwhile"


def test_run_of_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    call_again(path, "a", lambda name: [passed(name, 1.0)])
    here = new_record(get_device("cpu"), "quick")
    with pytest.raises(BenchError, match=r"cannot go on with it: kind of run: standard there, quick here$"):
        continued(read(path), here)


def test_what_has_no_time_left_is_skipped_and_earlier_rounds_stay(tmp_path: Path) -> None:
    times = iter([True, False, True, False])
    run = a_run(
        tmp_path / "out.json", lambda case: [passed(case.name, 1.0)], rounds=3, has_time_for=lambda case: next(times)
    )
    found = [(one.name, one.status, len(one.metrics), one.rounds) for one in run.cases([case("a"), case("b")]).cases]
    assert found == [("a", "pass", 2, [1, 1]), ("b", "skipped", 0, [])]


def test_round_that_the_end_of_time_cut_takes_no_number_away(tmp_path: Path) -> None:
    cut = CaseResult(name="a", implementation="", status="skipped", params={}, reason="out of time")
    (found,) = rounds(tmp_path, [passed("a", 1.0)], [cut])
    assert found.samples("time") == [1.0]


def test_a_run_has_what_its_kind_has_and_begins_with_what_tells_most() -> None:
    efforts: Any = {"a": "full", "b": "quick", "c": "standard", "d": "quick"}
    cases = [dataclasses.replace(case(name), effort=effort) for name, effort in efforts.items()]
    parts = {effort: ["".join(one.name for one in part) for part in plan.part(cases)] for effort, plan in PLANS.items()}
    assert parts == {"quick": ["bd", "ca"], "standard": ["bdc", "a"], "full": ["bdca", ""]}
