"""No check, no number; whatever goes wrong is a status with its reason, and the others go on."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import statistics
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.measurement import measure
from rlcore.bench.measurement.measure import UNRECORDED_TURNS, Sampling, run_case
from rlcore.bench.record import CaseResult
from rlcore.errors import DeviceError, MissingDependencyError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import MemoryStats
from tests.accuracy import assert_same_bits

QUICK = Sampling(min_samples=3, max_samples=6, budget_s=60.0, max_warmup=5)


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

    result = run_one(contender(double, lambda output: assert_same_bits(output, torch.full((4,), 2.0))))
    assert (result.name, result.implementation, result.status, result.reason) == ("test/case", "double", "pass", "")
    assert (result.params, result.flops, result.bytes) == ({"T": 4}, 8, 16)
    assert len(result.samples("time")) == QUICK.max_samples
    assert len(result.samples("first_run")) == 1
    assert result.num_warmup >= 3


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Seconds pass by this alone: what else the machine does takes none."""
    passed = [0.0]
    clock = types.SimpleNamespace(
        perf_counter=lambda: math.fsum(passed), process_time=time.process_time, time=time.time
    )
    monkeypatch.setattr(measure, "time", clock)
    return passed.append


def test_sample_is_the_time_that_passed(spend: Callable[[float], None]) -> None:
    durations = itertools.cycle([2**-5, 2**-6])
    result = run_one(contender(lambda: spend(next(durations))))
    assert set(result.samples("time")) == {2**-5, 2**-6}
    assert result.runs_per_sample == 1


def test_short_runs_are_joined_into_one_sample(spend: Callable[[float], None]) -> None:
    calls = []
    result = run_one(contender(lambda: (calls.append(1), spend(2**-20))))
    assert result.runs_per_sample > 10
    assert set(result.samples("time")) == {2**-20}
    assert len(calls) == 1 + result.num_warmup + result.runs_per_sample * len(result.samples("time"))


def test_first_runs_among_other_contenders_are_not_recorded(spend: Callable[[float], None]) -> None:
    """The first runs of a real contender take up to twice as long: the others have used its memory and caches."""
    order = []

    def disturbed() -> None:
        order.append("own")
        since = order[order.index("other") :].count("own") if "other" in order else 0
        spend(2**-5 if 0 < since <= UNRECORDED_TURNS else 2**-6)

    def other() -> None:
        order.append("other")
        spend(2**-6)

    found, _ = run_case(case_of(contender(disturbed), contender(other)), get_device("cpu"), QUICK)
    assert found.samples("time") == [2**-6] * QUICK.max_samples


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


def test_run_that_measures_itself_is_asked_once() -> None:
    runs, asked = [], []
    result = run_one(contender(lambda: runs.append(1), seconds=lambda output: asked.append(output) or 0.25))
    assert len(asked) == len(runs) == 1 + result.num_warmup + len(result.samples("time"))


def test_single_runs_find_a_cold_cache_and_joined_ones_do_not() -> None:
    ones = torch.ones(1 << 20)
    assert run_one(contender(lambda: ones.add(1).add(1).add(1).add(1))).cache == "cold"
    assert run_one(contender(lambda: None)).cache == "warm"


@pytest.mark.gpu
def test_events_on_the_device_agree_with_the_clock_for_long_runs() -> None:
    device = get_device("cuda")
    factor = torch.ones(8192, 8192, device=device.torch_device, dtype=torch.bfloat16)
    (result,) = run_case(case_of(contender(lambda: factor @ factor)), device, QUICK)
    wall, events = (statistics.median(result.samples(name)) for name in ("time", "device_time"))
    assert 0.8 < events / wall <= 1.0


class Accelerator:
    """FAKE: the host as if it were an accelerator; its memory is a list of sizes. Proves nothing about a GPU."""

    def __init__(self) -> None:
        host = get_device("cpu")
        self.spec = dataclasses.replace(host.spec, is_host=False)
        self.streams, self.synchronize, self.torch_device = host.streams, host.synchronize, host.torch_device
        self.telemetry, self.processes, self.is_active = host.telemetry, host.processes, False
        self.memory, self.taken, self.peak = self, 1000, 0

    def stats(self) -> MemoryStats:
        return MemoryStats(self.taken, self.taken, self.peak)

    def reset_peak(self) -> None:
        self.peak = self.taken

    def empty_cache(self) -> None:
        self.taken = 1000

    def activate(self) -> None:
        self.is_active = True


def test_accelerators_have_times_of_their_own_clock_and_extra_memory() -> None:
    device = Accelerator()

    def run() -> None:
        time.sleep(0.002)
        device.peak = max(device.peak, device.taken + 512)

    (result,) = run_case(case_of(contender(run)), device, QUICK)
    assert (result.status, result.reason) == ("pass", "")
    assert result.samples("extra_memory") == [512.0]
    walls, events = result.samples("time"), result.samples("device_time")
    assert len(walls) == len(events) == QUICK.max_samples
    assert all(0.002 <= event <= wall for event, wall in zip(events, walls, strict=True))
    assert not result.has("processor_time")
    assert device.is_active  # events are recorded on the current device


def test_limits_are_flops_of_the_dtype_and_bytes_of_memory_unless_the_case_says_otherwise() -> None:
    def limits(**options: Any) -> dict[str, int]:
        work = Work(contenders=(contender(lambda: None),), **options)
        (result,) = run_case(Case(name="x", description="", prepare=lambda device: work), get_device("cpu"), QUICK)
        return result.limits

    assert limits(params={"dtype": "float32"}, flops=8, bytes=16) == {"product/float32": 8, "memory": 16}
    assert limits(params={}, flops=8, bytes=16) == {"memory": 16}
    assert limits(params={}, bytes=16, limits={"to_host/pinned": 16}) == {"to_host/pinned": 16}
    assert limits(params={}) == {}


def test_what_a_failed_contender_held_is_there_for_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.ones(8)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no room for one more")

    def check(is_free: bool) -> None:
        assert is_free

    after = Contender(implementation="after", run=lambda: held[-1]() is None, check=check)
    first, second = run_case(case_of(contender(fail), after), get_device("cpu"), QUICK)
    assert (first.status, first.reason) == ("oom", "OutOfMemoryError: no room for one more")
    assert (second.status, second.reason) == ("pass", "")


def test_slow_runs_are_sampled_less() -> None:
    result = run_one(contender(lambda: time.sleep(0.02)), Sampling(min_samples=3, max_samples=50, budget_s=0.1))
    assert 3 <= len(result.samples("time")) < 10


def test_warm_up_goes_on_until_the_runs_are_stable() -> None:
    durations = iter([0.05, 0.03, 0.02, 0.01])
    settling = contender(lambda: next(durations, 0.01), seconds=float)
    result = run_one(settling, Sampling(min_samples=3, max_samples=3, max_warmup=20, stable_spread=0.3))
    assert (result.num_warmup, result.samples("time")) == (5, [0.01] * 3)


def test_slow_runs_are_warmed_up_twice_though_they_are_not_stable() -> None:
    told = iter([9.0, 8.0, 7.0])  # a step that compiles again in its third run

    def run() -> float:
        time.sleep(0.05)
        return next(told, 1.0)

    sampling = Sampling(min_samples=2, max_samples=9, budget_s=0.03, stable_spread=0.0)
    result = run_one(contender(run, seconds=float), sampling)
    assert (result.num_warmup, result.samples("time")) == (2, [1.0, 1.0])
    assert result.samples("first_run") == [9.0]


def test_contenders_take_turns() -> None:
    order = []
    names = ["a", "b", "c"]
    runs = [
        contender(lambda name=name: (order.append(name), time.sleep(0.001)), params={"name": name}) for name in names
    ]
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
    assert [metric.name for metric in result.metrics if metric.name != "processor_time"] == ["time"]
    assert sorted(set(checked)) == [1, 2, 3]


def test_contender_that_takes_longer_runs_less_often() -> None:
    order: list[str] = []
    runs = [
        contender(lambda name=name: order.append(name), params={"name": name}, most_runs=most)
        for name, most in (("slow", 2), ("quick", None), ("any", 9))
    ]
    work = Work(contenders=tuple(runs), params={}, num_runs=3)
    run_case(Case(name="n", description="", prepare=lambda _: work), get_device("cpu"), QUICK)
    assert order == ["slow", "quick", "any", "slow", "quick", "any", "quick", "any"]


def test_one_wrong_run_of_a_stated_number_leaves_no_number() -> None:
    def check(output: int) -> None:
        assert output != 2, "the second is wrong"

    (result,) = run_case(counting(3, check=check), get_device("cpu"), QUICK)
    assert (result.status, result.metrics) == ("fail", [])
    assert result.reason.startswith("AssertionError: the second is wrong")


def test_quantities_of_every_timed_run_are_recorded_in_order() -> None:
    case = counting(3, check=accept, quantities=lambda output: {"size": Quantity(output * 1.5, "MB")})
    (result,) = run_case(case, get_device("cpu"), QUICK)
    units = {metric.name: metric.unit for metric in result.metrics if metric.name != "processor_time"}
    assert units == {"time": "s", "size": "MB"}
    assert result.samples("size") == [1.5, 3.0, 4.5]


def test_run_of_several_steps_gives_a_sample_for_each() -> None:
    case = counting(
        2,
        check=accept,
        seconds=lambda output: [output * 1.0, output * 2.0],
        quantities=lambda output: {"rate": Quantity([1 / output, 0.5 / output], "1/s"), "size": Quantity(output, "B")},
    )
    (result,) = run_case(case, get_device("cpu"), QUICK)
    assert result.samples("time") == [1.0, 2.0, 2.0, 4.0]
    assert result.samples("rate") == [1.0, 0.5, 0.5, 0.25]
    assert result.samples("size") == [1, 2]
    (result,) = run_case(counting(2, check=accept, seconds=lambda _: [1.0, 0.0]), get_device("cpu"), QUICK)
    assert result.reason.startswith("ValueError: the case says that seconds is [1.0, 0.0]")


# ----------------------------------------------------------------------------------- no check, no number


def test_wrong_result_has_no_number_and_the_others_have() -> None:
    def check(output: int) -> None:
        assert output == 4, f"2 + 2 is not {output}"

    runs = [contender(lambda n=n: n, check, params={"n": n}) for n in (5, 4)]
    wrong, right = run_case(case_of(*runs), get_device("cpu"), QUICK)
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


def test_import_that_fails_in_another_library_is_blocked_and_in_ours_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_peer.py").write_text("def late():\n    import not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = importlib.import_module("a_peer").late
    result = run_one(contender(late))
    assert (result.status, result.reason) == ("blocked", "ModuleNotFoundError: No module named 'not_installed'")
    # As an operator of this package would: nobody else can mend that.
    monkeypatch.setitem(late.__globals__, "__name__", "rlcore.kernels.some")
    assert run_one(contender(late)).status == "fail"
    monkeypatch.setitem(late.__globals__, "__name__", "rlcore_plugin")
    assert run_one(contender(late)).status == "blocked"
    # An import that another import asks for, in a gradient too.
    (tmp_path / "wants_more.py").write_text("import not_installed\n")

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            importlib.import_module("wants_more")

    x = torch.ones(2, requires_grad=True)
    result = run_one(contender(lambda: Late.apply(x).sum().backward()))
    assert (result.status, result.reason) == ("blocked", "ModuleNotFoundError: No module named 'not_installed'")


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
