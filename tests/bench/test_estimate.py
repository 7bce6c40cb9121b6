"""The estimate is what cases took here before, else what their authors say; what does not fit is not begun."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.bench.case import Case
from rlcore.bench.measurement.system import new_record
from rlcore.bench.record import CaseResult, Metric
from rlcore.bench.run import PLANS, BenchRun, Durations, TimeLimit
from rlcore.registry import get_device

SLOW = Case(name="slow", description="", prepare=lambda device: None, estimate_s=40.0)
PROGRAM = Case(name="program", description="", prepare=lambda device: None, estimate_s=300.0)
FAST = Case(name="fast", description="", prepare=lambda device: None, estimate_s=1.0)
PLAN = PLANS["standard"]
CPU = get_device("cpu")
GPU = SimpleNamespace(name="cuda:0", spec=SimpleNamespace(is_host=False))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))


def a_run(path: Path) -> BenchRun:
    def run(case: Case) -> list[CaseResult]:
        time.sleep(0.02)
        names = ("time",) if case is PROGRAM else ("time", "first_run")
        metrics = [Metric(name=name, unit="s", samples=[1.0]) for name in names]
        return [CaseResult(name=case.name, implementation="x", status="pass", params={}, metrics=metrics)]

    return BenchRun(record=new_record(CPU), path=path, run=run, rounds=2)


def test_estimate_is_the_authors_until_it_was_measured(tmp_path: Path) -> None:
    first = Durations(CPU, PLAN)
    assert first.of(SLOW) == 40.0 * PLAN.rounds
    assert first.of(PROGRAM) == 300.0  # it states its number of runs, and has one round
    assert first.total([SLOW, FAST]) == pytest.approx(41 * PLAN.rounds, abs=15)
    first.keep(a_run(tmp_path / "out.json").cases([SLOW, PROGRAM]))
    second = Durations(CPU, PLAN)
    assert 0.02 <= second.of_round(SLOW) < 20.0
    assert second.of(SLOW) == second.of_round(SLOW) * PLAN.rounds
    assert second.of(PROGRAM) == second.of_round(PROGRAM) < 20.0
    assert second.of(FAST) == 1.0 * PLAN.rounds
    assert Durations(CPU, PLANS["quick"]).of(SLOW) == 40.0 * PLANS["quick"].rounds
    assert Durations(GPU, PLAN).of_round(SLOW) > 40.0  # a process needs time to get at an accelerator
    compiling = replace(SLOW, device_estimate_s=90.0)
    assert [Durations(on, PLAN).of_round(compiling) for on in (GPU, CPU)] == [90.0, second.of_round(SLOW)]
    compiling = replace(compiling, name="compiling")
    assert [Durations(on, PLAN).of(compiling) for on in (GPU, CPU)] == [90.0 * PLAN.rounds, 40.0 * PLAN.rounds]


def test_damaged_or_missing_cache_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durations = Durations(CPU, PLAN)
    durations.keep(a_run(tmp_path / "out.json").cases([FAST]))
    (file,) = (tmp_path / "cache").iterdir()
    for damaged in ("{", '{"fast": 3}'):
        file.write_text(damaged)
        assert Durations(CPU, PLAN).of(FAST) == 1.0 * PLAN.rounds
    monkeypatch.setenv("RLCORE_CACHE", "/proc/nowhere")
    Durations(CPU, PLAN).keep(a_run(tmp_path / "out.json").cases([FAST]))


def test_time_limit_counts_from_the_start_and_takes_what_fits() -> None:
    durations, now = Durations(CPU, PLAN), time.monotonic()
    half_gone = TimeLimit(0.5, durations, now - 15)
    assert half_gone.left_s == pytest.approx(15, abs=10)
    assert half_gone.has_time_for(FAST) and not half_gone.has_time_for(SLOW)
    assert TimeLimit(None, durations, now).has_time_for(PROGRAM)
    assert TimeLimit(None, durations, now).left_s is None
