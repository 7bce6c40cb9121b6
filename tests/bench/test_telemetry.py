"""What a device tells is kept, what it does not tell is None, and throttling and sharing leave a mark."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rlcore.bench.case import Case, Contender, Work
from rlcore.bench.measurement import telemetry as module
from rlcore.bench.measurement.measure import Sampling, run_case
from rlcore.bench.measurement.telemetry import Monitor, joined, marks
from rlcore.bench.record import CROWDED, Readings, Telemetry
from rlcore.errors import UnsupportedError
from rlcore.process.status import family_seconds
from rlcore.registry import get_device


def reading(**changes: Any) -> Any:
    told = {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "power_w": 400.0,
        "power_limit_w": 700.0,
        "temperature_c": 60,
    }
    return types.SimpleNamespace(**told | {"throttle_reasons": (), "energy_j": 10.0} | changes)


class Device:
    """FAKE: answers as devices.cuda does; proves what is made of the answers, and nothing about a GPU."""

    spec = types.SimpleNamespace(is_host=False)

    def __init__(self, *readings: Any, processes: int = 0) -> None:
        self._readings = iter(readings)
        self._processes = processes

    def telemetry(self) -> Any:
        return next(self._readings)

    def processes(self) -> list[Any]:
        return [object()] * self._processes


def watched(device: Any, times: int) -> Telemetry:
    monitor = Monitor(device)
    for _ in range(times):
        monitor.read()
    return monitor.telemetry()


def test_readings_are_kept_as_least_middle_and_most() -> None:
    device = Device(reading(), reading(sm_clock_mhz=1500, power_w=690.0), reading(sm_clock_mhz=1700))
    found = watched(device, 3)
    assert found.clock_mhz == Readings(min=1500, median=1700, max=1980)
    assert found.power_w == Readings(min=400, median=400, max=690)
    assert (found.power_limit_w, found.throttle_reasons, found.other_processes) == (700.0, [], 0)


def test_throttling_and_sharing_are_marked() -> None:
    device = Device(reading(), reading(throttle_reasons=("software power cap",)), processes=2)
    found = watched(device, 2)
    assert found.throttle_reasons == ["software power cap"]
    assert marks(found)[:2] == ["throttled: software power cap", "shared: 2 other processes on the device"]
    assert marks(Telemetry(host_share_of_others=0.05, throttle_reasons=[], other_processes=0)) == []


@pytest.mark.parametrize(("processors", "most"), [(2, 0.62), (64, 0.98), (1, 0.24)])
def test_others_who_leave_no_processor_free_crowd_the_host(
    processors: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert marks(Telemetry(host_share_of_others=most)) == ["shared: others used the host's processors"]
    assert marks(Telemetry(host_share_of_others=most + 0.015)) == [CROWDED]


def test_what_is_not_told_is_none() -> None:
    device = get_device("cpu")
    with pytest.raises(UnsupportedError, match=r"^telemetry of cpu:0 is not supported: its plugin does not ask"):
        device.telemetry()
    found = watched(device, 1)
    assert (found.clock_mhz, found.power_w, found.throttle_reasons, found.other_processes) == (None,) * 4
    assert watched(Device(reading(throttle_reasons=None, power_limit_w=None)), 1).throttle_reasons is None


def test_share_of_others_counts_neither_this_process_nor_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy, available and own seconds: of 10 s that were there 6 were used, 4 of them by this process."""
    answers = iter([(100.0, 200.0, 50.0), (106.0, 210.0, 54.0)])
    monkeypatch.setattr(module, "_processor_seconds", lambda: next(answers))
    assert watched(get_device("cpu"), 0).host_share_of_others == pytest.approx(0.2)


def test_share_of_others_is_measured_here() -> None:
    monitor = Monitor(get_device("cpu"))
    while (share := monitor.telemetry().host_share_of_others) is None:  # until there is something to divide by
        sum(range(100_000))
    assert 0 <= share <= 1


def test_workers_that_live_on_are_no_others() -> None:
    """Linux counts hundredths of a second, and rounds each count down: half of the time is enough to tell."""
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = family_seconds(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"\n"
        alive = family_seconds(os.getpid())
        worker.communicate(b"\n")
    assert min(alive, family_seconds(os.getpid())) - before >= 0.3 / 2


def test_two_processes_join_to_the_worse_of_both() -> None:
    one = Telemetry(clock_mhz=Readings(min=1, median=2, max=3), throttle_reasons=["a"], host_share_of_others=0.3)
    two = Telemetry(clock_mhz=Readings(min=2, median=4, max=5), throttle_reasons=["b"], other_processes=1)
    for pair in ((one, two), (two, one)):
        assert joined(*pair).clock_mhz == Readings(min=1, median=3, max=5)
    found = joined(one, two)
    assert (found.throttle_reasons, found.other_processes, found.host_share_of_others) == (["a", "b"], 1, 0.3)


# --------------------------------------------------------------------------------------------------- energy


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Two processor packages whose counters say 3 J together."""
    monkeypatch.setattr(module, "_RAPL", tmp_path)
    files = [tmp_path / f"intel-rapl:{number}" / "energy_uj" for number in range(2)]
    for file, energy in zip(files, ("1000000", "2000000"), strict=True):
        file.parent.mkdir()
        file.write_text(energy)
    return files


def test_energy_of_a_host_is_that_of_its_packages(counters: list[Path]) -> None:
    assert Monitor(get_device("cpu")).energy_j() == 3.0
    counters[0].unlink()
    counters[0].mkdir()  # cannot be read
    assert Monitor(get_device("cpu")).energy_j() is None


def test_energy_of_a_run_is_the_counters_difference_over_the_runs(counters: list[Path]) -> None:
    def run() -> None:
        counters[0].write_text(str(int(counters[0].read_text()) + 500_000))

    work = Work(contenders=(Contender(implementation="x", run=run, check=lambda _: None),), params={})
    case = Case(name="x", description="", prepare=lambda device: work)
    sampling = Sampling(min_samples=2, max_samples=2, shortest_sample_s=0.0, energy_s=0.01)
    (result,) = run_case(case, get_device("cpu"), sampling)
    assert result.samples("energy") == [pytest.approx(0.5)]
    (result,) = run_case(case, get_device("cpu"), Sampling(min_samples=2, max_samples=2))
    assert not result.has("energy")


@pytest.mark.gpu
def test_gpu_tells_its_clocks_and_counts_energy() -> None:
    pytest.importorskip("pynvml")
    device = get_device("cuda")
    monitor = Monitor(device)
    before = monitor.energy_j()
    monitor.read()
    found = monitor.telemetry()
    assert found.clock_mhz is not None and found.clock_mhz.max > 100
    assert found.power_w is not None and found.power_w.max > 10
    assert found.other_processes is not None and found.throttle_reasons is not None
    after = monitor.energy_j()
    assert before is None or (after is not None and after >= before)
