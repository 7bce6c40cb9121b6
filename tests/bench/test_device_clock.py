"""The time of the device is without that of the host, wherever it can be; and where it is not, the result says so."""

from __future__ import annotations

import statistics
import time
import types
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from rlcore.bench.case import Case, Contender, Work, load_cases
from rlcore.bench.measurement import device_clock, measure
from rlcore.bench.measurement.device_clock import Flush
from rlcore.bench.measurement.measure import UNRECORDED_TURNS, Sampling, run_case
from rlcore.bench.record import CaseResult
from rlcore.registry import get_device
from rlcore.types import MemoryStats

LOOK_S = 1e-6
QUICK = Sampling(min_samples=5, max_samples=5, budget_s=1.0, max_warmup=5)
FLUSH_S = 0.5e-3
QUEUED_S = 2e-3
ON_DEVICE_S = 1e-3


class Moment:
    """An event of a ``Queue``."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = self._queue.done_at_s()

    def query(self) -> bool:
        return self._queue.now_s() >= self.at_s

    def elapsed_time(self, end: Moment) -> float:
        return (end.at_s - self.at_s) * 1000


class Queue:
    """FAKE: a device that does what is queued one after the other, each for a stated time. Tells nothing of a GPU.

    The host's clock goes on by what the host spends and waits for, and a little by each look at it: what else the
    machine does takes none of this time.
    """

    def __init__(self) -> None:
        self.spec = types.SimpleNamespace(is_host=False)
        self.streams = types.SimpleNamespace(event=lambda timing: Moment(self))
        self.memory = types.SimpleNamespace(
            stats=lambda: MemoryStats(0, 0, 0), reset_peak=lambda: None, empty_cache=lambda: None
        )
        self.torch_device = torch.device("cpu")
        self.telemetry, self.processes, self.activate = get_device("cpu").telemetry, list, lambda: None
        self.queued: list[str] = []
        self.num_synchronized = 0
        self._now_s = self._until_s = 0.0

    def now_s(self) -> float:
        self._now_s += LOOK_S
        return self._now_s

    def spend(self, seconds: float) -> None:
        """Of the host."""
        self._now_s += seconds

    def done_at_s(self) -> float:
        return max(self._until_s, self.now_s())

    def queue(self, name: str, seconds: float) -> None:
        self.queued.append(name)
        self._until_s = self.done_at_s() + seconds

    def synchronize(self) -> None:
        self.num_synchronized += 1
        self._now_s = self.done_at_s()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(Flush, "__call__", lambda self: queue.queue("flush", FLUSH_S))
    clock = types.SimpleNamespace(perf_counter=queue.now_s, process_time=time.process_time, time=time.time)
    monkeypatch.setattr(measure, "time", clock)
    return queue


def operator(queue: Queue, queued_s: float = QUEUED_S, on_device_s: float = ON_DEVICE_S) -> Callable[[], None]:
    """The host first takes its time, then queues the kernel: the device is idle meanwhile."""

    def run() -> None:
        queue.spend(queued_s)
        queue.queue("run", on_device_s)

    return run


def measured(
    queue: Any, run: Callable[[], Any], runs_on: Literal["host", "stream", "device"], sampling: Sampling = QUICK
) -> CaseResult:
    only = Contender(implementation="x", run=run, check=lambda _: None)
    work = Work(contenders=(only,), params={}, runs_on=runs_on)
    (result,) = run_case(Case(name="x", description="", prepare=lambda _: work), queue, sampling)
    assert result.status == "pass", result.reason
    return result


def median(result: CaseResult, name: str) -> float:
    return statistics.median(result.samples(name))


def test_time_of_the_device_is_without_the_hosts_and_wall_time_with_it(queue: Queue) -> None:
    result = measured(queue, operator(queue), "stream")
    assert median(result, "device_time") == pytest.approx(ON_DEVICE_S, rel=0.02)
    assert median(result, "time") >= QUEUED_S + ON_DEVICE_S
    assert len(result.samples("time")) == len(result.samples("device_time")) == QUICK.max_samples
    assert not result.has("queueing_in_device_time")
    assert result.cache == "cold"


def test_work_elsewhere_than_on_the_stream_is_timed_with_the_hosts_time_and_says_so(queue: Queue) -> None:
    result = measured(queue, operator(queue), "device")
    assert median(result, "device_time") >= QUEUED_S + ON_DEVICE_S
    assert QUEUED_S <= median(result, "queueing_in_device_time") < median(result, "time")
    assert queue.queued.count("flush") == UNRECORDED_TURNS + QUICK.max_samples  # nothing was hidden


@pytest.mark.parametrize("where", ["first", "last"])
def test_run_that_waits_for_the_device_hides_nothing_and_says_so(queue: Queue, where: str) -> None:
    def run() -> None:
        if where == "first":
            queue.synchronize()
        operator(queue)()
        if where == "last":
            queue.synchronize()

    result = measured(queue, run, "stream")
    assert median(result, "device_time") >= QUEUED_S + ON_DEVICE_S
    assert median(result, "queueing_in_device_time") >= QUEUED_S


def test_host_that_takes_too_long_hides_nothing_and_says_so(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "_LONGEST_S", QUEUED_S / 2)
    result = measured(queue, operator(queue), "stream")
    assert QUEUED_S <= median(result, "queueing_in_device_time") < median(result, "time")
    assert queue.queued.count("flush") == UNRECORDED_TURNS + QUICK.max_samples


def test_long_work_is_measured_in_one_run(queue: Queue) -> None:
    result = measured(queue, operator(queue, queued_s=20e-6, on_device_s=50e-3), "stream")
    assert median(result, "device_time") == pytest.approx(50e-3, rel=0.02)
    assert not result.has("queueing_in_device_time")
    assert queue.queued.count("run") == 1 + result.num_warmup + QUICK.max_samples


def test_joined_runs_find_what_the_run_before_left_in_the_cache(queue: Queue) -> None:
    joined = Sampling(min_samples=1, max_samples=1, max_warmup=3, shortest_sample_s=20 * 150e-6)
    result = measured(queue, operator(queue, queued_s=100e-6, on_device_s=50e-6), "stream", joined)
    runs = result.runs_per_sample
    assert runs >= 2 and result.cache == "warm"
    assert median(result, "device_time") == pytest.approx(50e-6, rel=0.02)
    since_flush = "".join(name[0] for name in queue.queued).rpartition("f")[2]
    assert since_flush == "r" * (1 + runs)


def test_sample_in_which_the_host_was_late_is_taken_again(queue: Queue) -> None:
    num_hidden = 0

    def run() -> None:
        nonlocal num_hidden
        num_hidden += queue.done_at_s() > queue.now_s()
        queue.spend(QUEUED_S if num_hidden != 3 else 0.15)
        queue.queue("run", ON_DEVICE_S)

    result = measured(queue, run, "stream", QUICK)
    # One to find out whether it can be hidden; one again.
    assert num_hidden >= 1 + QUICK.max_samples + 1
    assert result.samples("device_time") == [pytest.approx(ON_DEVICE_S, rel=0.02)] * QUICK.max_samples


def test_what_uses_no_device_is_timed_by_the_hosts_clock_alone(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time", time)
    found = []
    result = measured(queue, lambda: found.append(queue.num_synchronized), "host")
    on_host = measured(get_device("cpu"), lambda: None, "device")
    assert {metric.name for metric in result.metrics} == {metric.name for metric in on_host.metrics}
    assert result.runs_per_sample > 50
    assert median(result, "time") < QUEUED_S
    assert queue.queued == []  # no cache of the device was overwritten
    # Synchronised before each sample, and not once more at its end.
    alone = result.num_warmup - UNRECORDED_TURNS * result.runs_per_sample
    assert queue.num_synchronized == 1 + alone + UNRECORDED_TURNS + len(result.samples("time"))


@pytest.mark.parametrize("name", ["dispatch/device", "dispatch/op", "startup/import", "startup/help"])
def test_cases_of_the_host_say_so(name: str) -> None:
    assert load_cases()[name].prepare(get_device("cpu")).runs_on == "host"


def test_caches_of_the_host_are_overwritten_where_the_work_is_on_the_host() -> None:
    device = types.SimpleNamespace(torch_device=torch.device("meta"))
    flush = Flush(device, is_host=True)
    flush()
    assert flush._buffer is not None and flush._buffer.device.type == "cpu"
    flush = Flush(device, is_host=False)
    flush()
    assert flush._buffer is not None and flush._buffer.device.type == "meta"


# ------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_time_of_a_small_kernel_on_a_gpu_is_without_what_the_host_does_before_it() -> None:
    device = get_device("cuda")
    x = torch.ones(1 << 20, device=device.torch_device)

    def late() -> torch.Tensor:
        time.sleep(QUEUED_S)
        return x + 1

    result = measured(device, late, "stream")
    assert median(result, "device_time") < QUEUED_S / 10
    assert median(result, "time") > QUEUED_S
    assert not result.has("queueing_in_device_time")


@pytest.mark.gpu
def test_run_on_a_gpu_that_waits_for_it_says_so() -> None:
    device = get_device("cuda")
    x = torch.ones(1 << 20, device=device.torch_device)
    result = measured(device, lambda: float((x + 1).sum()), "stream")
    assert result.has("queueing_in_device_time")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dispatch/device", "dispatch/op"])
def test_what_asking_costs_is_the_same_number_beside_a_gpu(name: str) -> None:
    beside = run_case(load_cases()[name], get_device("cpu"))
    for result, on_host in zip(run_case(load_cases()[name], get_device("cuda")), beside, strict=True):
        assert result.runs_per_sample > 50 and median(result, "time") < 4 * median(on_host, "time")
        assert not result.has("device_time")
