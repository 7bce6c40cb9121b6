"""docs/adopting.md: its table is the record of the race."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from rlcore.bench.record import read

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "TRL alone": "trl",
    "TRL after `accelerate_trl`": "trl+rlcore, offloaded",
    "rlcore's engines": "rlcore, offloaded",
}
SCALES = {"time": 1.0, "generate": 1.0, "old_logprob": 1.0, "sync": 1.0, "rest": 1.0, "peak": 1e9}


def test_the_table_of_the_page_is_the_record() -> None:
    page = (ROOT / "docs" / "adopting.md").read_text("utf-8")
    rows = re.findall(r"^\| (1\.5|7)B, (.*?) \| (.*) \|$", page, re.MULTILINE)
    medians = {
        (one.name, one.implementation): [statistics.median(one.samples(name)) / scale for name, scale in SCALES.items()]
        for one in read(ROOT / "bench" / "results" / "race-h200.json").cases
    }
    assert len(rows) == len(medians)
    for size, side, cells in rows:
        told = [cell.removesuffix(" GB") for cell in cells.split(" | ")]
        measured = medians[f"race/{size}b", NAMES[side]]
        assert told == [f"{value:.{len(cell.partition('.')[2])}f}" for cell, value in zip(told, measured, strict=True)]
