"""No check, no number; whatever goes wrong is a status with its reason, and the others go on."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.result import CaseResult, read
from rlcore.bench.runner import Sampling, run_case, run_cases
from rlcore.errors import BenchError, DeviceError, MissingDependencyError, UnsupportedError
from rlcore.registry import get_device

QUICK = Sampling(min_samples=3, max_samples=6, budget_s=0.5, max_warmup=5)


def accept(output: Any) -> None:
    pass


def contender(run: Callable[[], Any], check: Callable[[Any], None] = accept, **options: Any) -> Contender:
    return Contender(implementation=getattr(run, "__name__", "run"), run=run, check=check, **options)


def case_of(*contenders: Contender, name: str = "test/case") -> Case:
    work = Work(contenders=contenders, params={"T": 4}, flops=8, bytes=16)
    return Case(name=name, description="", prepare=lambda device: work)


def run_one(only: Contender, sampling: Sampling = QUICK) -> CaseResult:
    (result,) = run_case(case_of(only), get_device("cpu"), sampling)
    return result


def raising(error: Exception) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


# --------------------------------------------------------------------------------------------------- numbers


def test_result_keeps_raw_samples_and_says_what_ran() -> None:
    def double() -> torch.Tensor:
        return torch.ones(4) * 2

    result = run_one(contender(double, lambda output: torch.testing.assert_close(output, torch.full((4,), 2.0))))
    assert (result.name, result.implementation, result.status, result.reason) == ("test/case", "double", "pass", "")
    assert (result.params, result.flops, result.bytes) == ({"T": 4}, 8, 16)
    assert len(result.samples("time")) == QUICK.max_samples
    assert len(result.samples("first_run")) == 1
    assert result.num_warmup >= 3


def test_sample_is_the_time_that_passed() -> None:
    result = run_one(contender(lambda: time.sleep(0.02)))
    assert 0.02 <= statistics.median(result.samples("time")) < 0.04
    assert result.runs_per_sample == 1


def test_short_runs_are_joined_into_one_sample() -> None:
    calls = []
    result = run_one(contender(lambda: calls.append(1)))
    assert result.runs_per_sample > 10
    assert statistics.median(result.samples("time")) < 20e-6
    assert len(calls) == 1 + result.num_warmup + result.runs_per_sample * len(result.samples("time"))


def test_sample_lasts_until_the_device_is_done(device: Any) -> None:
    size = 512 if device.type == "cpu" else 8192
    factor = torch.ones(size, size, device=device.torch_device, dtype=torch.bfloat16)
    (result,) = run_case(case_of(contender(lambda: factor @ factor)), device, QUICK)
    # No device here does 2e15 operations a second; a launch alone would seem to.
    assert min(result.samples("time")) > 2 * size**3 / 2e15


def test_run_that_measures_itself_is_believed() -> None:
    result = run_one(contender(lambda: "0.25", seconds=float))
    assert set(result.samples("time")) == {0.25}
    assert result.runs_per_sample == 1


def test_slow_runs_are_sampled_less() -> None:
    result = run_one(contender(lambda: time.sleep(0.02)), Sampling(min_samples=3, max_samples=50, budget_s=0.1))
    assert 3 <= len(result.samples("time")) < 10


def test_warm_up_goes_on_until_the_runs_are_stable() -> None:
    durations = iter([0.05, 0.03, 0.02, 0.01])

    def settling() -> None:
        time.sleep(next(durations, 0.01))

    result = run_one(contender(settling), Sampling(min_samples=3, max_samples=3, max_warmup=20, stable_spread=0.3))
    assert 5 <= result.num_warmup <= 20
    assert max(result.samples("time")) < 0.02


def test_contenders_take_turns() -> None:
    order = []
    names = ["a", "b", "c"]
    runs = [contender(lambda name=name: (order.append(name), time.sleep(0.001))) for name in names]
    run_case(case_of(*runs), get_device("cpu"), QUICK)
    assert order[-3 * QUICK.max_samples :] == names * QUICK.max_samples


def counting(num_runs: int, **options: Any) -> Case:
    """A case whose run returns how often it ran."""
    runs = itertools.count(1)
    only = Contender(implementation="count", run=lambda: next(runs), **options)
    return Case(name="n", description="", prepare=lambda _: Work(contenders=(only,), params={}, num_runs=num_runs))


def test_stated_number_of_runs_is_what_runs_and_each_is_checked() -> None:
    checked: list[int] = []
    (result,) = run_case(counting(3, check=checked.append), get_device("cpu"), QUICK)
    assert (result.num_warmup, result.runs_per_sample, len(result.samples("time"))) == (0, 1, 3)
    assert [metric.name for metric in result.metrics] == ["time"]
    assert sorted(set(checked)) == [1, 2, 3]


def test_one_wrong_run_of_a_stated_number_leaves_no_number() -> None:
    def check(output: int) -> None:
        assert output != 2, "the second is wrong"

    (result,) = run_case(counting(3, check=check), get_device("cpu"), QUICK)
    assert (result.status, result.metrics) == ("fail", [])
    assert result.reason.startswith("AssertionError: the second is wrong")


def test_quantities_of_every_timed_run_are_recorded_in_order() -> None:
    case = counting(3, check=accept, quantities=lambda output: {"size": Quantity(output * 1.5, "MB")})
    (result,) = run_case(case, get_device("cpu"), QUICK)
    assert [(metric.name, metric.unit) for metric in result.metrics] == [("time", "s"), ("size", "MB")]
    assert result.samples("size") == [1.5, 3.0, 4.5]


# ----------------------------------------------------------------------------------- no check, no number


def test_wrong_result_has_no_number_and_the_others_have() -> None:
    def check(output: int) -> None:
        assert output == 4, f"2 + 2 is not {output}"

    wrong, right = run_case(case_of(contender(lambda: 5, check), contender(lambda: 4, check)), get_device("cpu"), QUICK)
    assert (wrong.status, wrong.metrics) == ("fail", [])
    assert wrong.reason.startswith("AssertionError: 2 + 2 is not 5")
    assert right.status == "pass"


def test_result_that_turns_wrong_while_timed_has_no_number() -> None:
    total = torch.zeros(1)

    def accumulate() -> torch.Tensor:
        return total.add_(1)

    def check(output: torch.Tensor) -> None:
        assert output.item() == 1, f"expected 1, got {output.item()}"

    result = run_one(contender(accumulate, check))
    assert (result.status, result.metrics) == ("fail", [])
    assert "expected 1, got" in result.reason


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ZeroDivisionError("division by zero"), "fail", "ZeroDivisionError: division by zero"),
        (UnsupportedError("float8", "no such cores"), "blocked", "UnsupportedError: float8 is not supported: no such"),
        (MissingDependencyError("trl", needed_for="this", extra="x"), "blocked", "MissingDependencyError: this needs"),
        (DeviceError("no peer"), "blocked", "DeviceError: no peer"),
        (MemoryError(), "oom", "MemoryError"),
    ],
)
def test_error_is_a_status_with_its_reason(error: Exception, status: str, reason: str) -> None:
    result = run_one(contender(raising(error)))
    assert (result.status, result.metrics) == (status, [])
    assert result.reason.startswith(reason)


def test_error_while_preparing_is_the_result_of_the_case() -> None:
    case = Case(name="x", description="", prepare=lambda device: raising(UnsupportedError("x", "y"))())
    (result,) = run_case(case, get_device("cpu"))
    assert (result.name, result.implementation, result.status) == ("x", "", "blocked")


def test_running_out_of_memory_is_oom_and_the_others_go_on(device: Any) -> None:
    def too_much() -> torch.Tensor:
        return torch.empty(2**50, dtype=torch.uint8, device=device.torch_device)

    def little() -> torch.Tensor:
        return torch.empty(8, device=device.torch_device)

    first, second = run_case(case_of(contender(too_much), contender(little)), device, QUICK)
    assert (first.status, second.status) == ("oom", "pass"), first.reason


# ----------------------------------------------------------------------------------------------------- runs


def test_each_case_is_on_disk_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    on_disk = []

    def look(device: Any) -> Work:
        on_disk.append([case.name for case in read(path).cases] if path.exists() else None)
        return Work(contenders=(contender(lambda: None),), params={})

    cases = [Case(name=name, description="", prepare=look) for name in ("a", "b", "c")]
    reported = []
    record = run_cases(cases, get_device("cpu"), path, sampling=QUICK, report=reported.append)
    assert on_disk == [None, ["a"], ["a", "b"]]
    assert read(path) == record
    assert reported == record.cases


def test_interruption_keeps_what_is_done_and_marks_the_rest(tmp_path: Path) -> None:
    def interrupted(device: Any) -> Work:
        raise KeyboardInterrupt

    cases = [
        case_of(contender(lambda: None), name="a"),
        Case(name="b", description="", prepare=interrupted),
        case_of(contender(lambda: None), name="c"),
    ]
    with pytest.raises(KeyboardInterrupt):
        run_cases(cases, get_device("cpu"), tmp_path / "out.json", sampling=QUICK)
    found = [(case.name, case.status, case.reason) for case in read(tmp_path / "out.json").cases]
    skipped = ("skipped", "the run was interrupted")
    assert found == [("a", "pass", ""), ("b", *skipped), ("c", *skipped)]


def test_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ran = []
    with pytest.raises(BenchError, match=r"cannot write the benchmark record .*: no folder .*nowhere that can be"):
        run_cases([case_of(contender(lambda: ran.append(1)))], get_device("cpu"), tmp_path / "nowhere" / "out.json")
    assert ran == []
