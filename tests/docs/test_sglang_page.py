"""docs/sglang.md: its table of syncs and tokens is the records."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from rlcore.bench.record import read

ROOT = Path(__file__).resolve().parents[2]
CASES = {"7B": "7b", "30B-A3B": "30b_a3b"}
ROWS = {
    "new weights, `direct`": ("sync", "sglang_tensors", "time"),
    "by `packed`": ("packed", "", "time"),
    "first round, verified": ("sync", "", "first_sync"),
    "256 requests of 128 tokens": ("tokens", "sglang_tokens", "time"),
}
"""rlcore's implementation, that of SGLang alone, and the metric."""


def test_the_table_of_the_page_is_the_records() -> None:
    page = (ROOT / "docs" / "sglang.md").read_text("utf-8")
    rows = re.findall(r"^\| (7B|30B-A3B)(?:, [\d.]+ GB)?: (.*?) \| (.*?) \| (.*?) ?\|$", page, re.MULTILINE)
    assert [(model, label) for model, label, *_ in rows] == [(model, label) for model in CASES for label in ROWS]
    records = [read(path) for path in (ROOT / "bench" / "results").glob("sglang-*.json")]
    measured = {(one.name, one.implementation): one for record in records for one in record.passed()}
    for model, label, ours, beside in rows:
        name, (own, other, metric) = f"weight_sync/sglang/{CASES[model]}", ROWS[label]
        assert_shown(ours, measured[name, own].samples(metric))
        assert bool(beside) == bool(other)
        if other:
            assert_shown(beside, measured[f"{name}_alone", other].samples(metric))


def assert_shown(cell: str, samples: list[float]) -> None:
    """The cell is the median, with as many digits as it has."""
    number, unit = cell.split()[:2]
    scale = {"ms": 1e3, "s": 1.0}[unit]
    assert number == f"{statistics.median(samples) * scale:.{len(number.partition('.')[2])}f}"
