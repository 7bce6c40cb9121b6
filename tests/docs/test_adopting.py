"""docs/adopting.md: its table is the records of the race."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from rlcore.bench.record import CaseResult, read

ROOT = Path(__file__).resolve().parents[2]
SIDES = {
    "TRL alone": ("", "trl"),
    "TRL after `accelerate_trl`": ("_accelerate_trl", "trl+rlcore"),
    "rlcore's engines": ("", "rlcore"),
    "rlcore's engines, offloaded": ("_offloaded", "rlcore, offloaded"),
}
"""The end of the case's name, and the implementation."""
SCALES = {"time": 1.0, "generate": 1.0, "old_logprob": 1.0, "sync": 1.0, "rest": 1.0, "peak": 1e9}


def test_the_table_of_the_page_is_the_records() -> None:
    page = (ROOT / "docs" / "adopting.md").read_text("utf-8")
    records = [read(path) for path in sorted((ROOT / "bench" / "results").glob("race-*.json"))]
    measured = {(one.name, one.implementation): one for record in records for one in record.passed()}
    rows = re.findall(r"^\| (1\.5|7)B, (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == len(measured)
    for size, side, cells in rows:
        ending, implementation = SIDES[side]
        assert cells.split(" | ") == shown(measured[f"race/{size}b{ending}", implementation], cells.split(" | "))


def shown(result: CaseResult, cells: list[str]) -> list[str]:
    """Return the medians of a result, with as many digits as the page has."""
    found = []
    for cell, (name, scale) in zip(cells, SCALES.items(), strict=True):
        if not result.has(name):
            found.append("in the rest")
            continue
        number, *unit = cell.split(" ")
        median = statistics.median(result.samples(name)) / scale
        found.append(" ".join([f"{median:.{len(number.partition('.')[2])}f}", *unit]))
    return found
