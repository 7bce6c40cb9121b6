"""The page has the runs of the records, as the program that made them prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rollout.measured_learning import Run, paired, table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "rollout"
RECORDS = sorted(FOLDER.glob("*.json"))


def runs_of(record: Path) -> list[Run]:
    found: list[Run] = json.loads(record.read_bytes())["runs"]
    return found


def test_the_page_has_the_tables_of_the_records() -> None:
    page = (ROOT / "docs" / "rollout.md").read_text()
    runs = [run for record in RECORDS for run in runs_of(record)]
    assert "\n".join(table(runs, 40)) in page
    assert "\n".join(paired(runs, 40)) in page


def test_bounds_are_compared_with_the_synchronous_run_of_the_same_seed() -> None:
    ends = [(0, 1, 0.9, 40), (0, 2, 0.5, 60), (2, 2, 0.4, 30), (2, 1, 0.9, 20), (2, 3, 0.1, 1), (4, 1, 0.9, 1)]
    runs = [{"max_staleness": b, "seed": seed, "accuracy": a, "seconds": s, "steps": 40} for b, seed, a, s in ends]
    assert paired(runs, 40)[2:] == ["| 2 | +0.000, -0.100 | -0.050 | 0.050 | 2.00, 2.00 |"]
    assert paired(runs, 20) == []


@pytest.mark.parametrize("record", sorted(FOLDER.rglob("*.json")), ids=lambda path: path.stem)
def test_no_recorded_run_broke_its_bound_or_threw_a_token_away(record: Path) -> None:
    for run in runs_of(record):
        stats = run["stats"]
        assert max(map(int, stats["staleness"])) <= run["max_staleness"]
        assert sum(stats["staleness"].values()) == stats["given"] == 32 * run["steps"]
        assert stats["tokens_discarded"] == stats["too_stale"] == stats["failed"] == 0
