"""The estimate is what cases took here before, else what their authors say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlcore.bench.case import Case
from rlcore.bench.estimate import Durations
from rlcore.bench.runner import PLANS

SLOW = Case(name="slow", description="", prepare=lambda device: None, estimate_s=40.0)
PROGRAM = Case(name="program", description="", prepare=lambda device: None, estimate_s=300.0)
FAST = Case(name="fast", description="", prepare=lambda device: None, estimate_s=1.0)
PLAN = PLANS["standard"]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))


def test_estimate_is_the_authors_until_it_was_measured() -> None:
    first = Durations("cpu:0", PLAN)
    assert first.of(SLOW) == 40.0 * PLAN.rounds
    assert first.of(PROGRAM) == 300.0  # it states its number of runs, and has one round
    assert first.total([SLOW, FAST]) == pytest.approx(41 * PLAN.rounds, abs=10)
    for _ in range(2):  # rounds add up
        first.begin(SLOW)
        time.sleep(0.02)
        first.end(SLOW)
    first.keep()
    second = Durations("cpu:0", PLAN)
    assert 0.04 <= second.of(SLOW) < 1.0
    assert second.of(FAST) == 1.0 * PLAN.rounds
    assert Durations("cuda:0", PLAN).of(SLOW) == Durations("cpu:0", PLANS["quick"]).of(SLOW) * 3 / 2 == 120.0


def test_damaged_or_missing_cache_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durations = Durations("cpu:0", PLAN)
    durations.keep()
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("{")
    assert Durations("cpu:0", PLAN).of(FAST) == 1.0 * PLAN.rounds
    monkeypatch.setenv("RLCORE_CACHE", "/proc/nowhere")
    Durations("cpu:0", PLAN).keep()
