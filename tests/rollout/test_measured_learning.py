"""The page has the runs of the records, as the program that made them prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rollout.measured_learning import Run, table

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "bench" / "results" / "rollout").glob("*.json"))


def runs_of(record: Path) -> list[Run]:
    found: list[Run] = json.loads(record.read_bytes())["runs"]
    return found


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_the_page_has_the_table_of_each_record(record: Path) -> None:
    page = (ROOT / "docs" / "rollout.md").read_text()
    assert "\n".join(table(runs_of(record), 40)) in page


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_no_recorded_run_broke_its_bound_or_threw_a_token_away(record: Path) -> None:
    for run in runs_of(record):
        stats = run["stats"]
        assert max(map(int, stats["staleness"])) <= run["max_staleness"]
        assert sum(stats["staleness"].values()) == stats["given"] == 32 * run["steps"]
        assert stats["tokens_discarded"] == stats["too_stale"] == stats["failed"] == 0
