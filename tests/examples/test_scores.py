"""Tables of what the programs of examples/algorithms/ do to the score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import InvalidInputError
from rlcore.examples.algorithms.scores import SCHEMA, engines_table

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "bench" / "results" / "scores").glob("engines-*.json"), reverse=True)
"""The GPU first, as on the page."""


def record(*steps: int) -> dict[str, Any]:
    """A run of each of these lengths."""
    runs = [
        {"program": "grpo", "trainer": "fsdp2", "sampler": "hf", "seed": seed, "steps": count}
        | {"before": 0.25, "after": 0.5, "rewards": [0.25] * count}
        for seed, count in enumerate(steps)
    ]
    device = {"type": "cpu", "product": "a CPU"}
    return {"schema": SCHEMA, "commit": None, "device": device, "versions": {}, "runs": runs}


def test_the_page_has_the_table_of_the_records() -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    assert engines_table([json.loads(path.read_text()) for path in RECORDS]) in page


def test_short_runs_have_the_steps_that_they_took() -> None:
    head, line, row = engines_table([record(6, 6)]).splitlines()[:3]
    assert "| step 1 | step 5 | score" in head
    assert head.count("|") == line.count("|") == row.count("|")


def test_runs_of_different_lengths_have_no_table() -> None:
    with pytest.raises(InvalidInputError, match="this table is of runs with the same steps, and the records have 5, 6"):
        engines_table([record(5, 6)])
