"""Tables of what the programs of examples/algorithms/ do to the score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import InvalidInputError
from rlcore.examples.algorithms.scores import SCHEMA, engines_table, programs_table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "scores"
RECORDS = sorted(FOLDER.glob("engines-*.json"), reverse=True)
"""The GPU first, as on the page."""


def record(*steps: int) -> dict[str, Any]:
    """A run of each of these lengths."""
    runs = [
        {"program": "grpo", "trainer": "fsdp2", "sampler": "hf", "seed": seed, "steps": count}
        | {"before": 0.25, "after": 0.5, "before_sampled": 0.125, "after_sampled": 0.375, "rewards": [0.25] * count}
        for seed, count in enumerate(steps)
    ]
    device = {"type": "cpu", "product": "a CPU"}
    return {"schema": SCHEMA, "commit": None, "device": device, "versions": {}, "runs": runs}


def test_the_pages_have_the_tables_of_the_records() -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    assert engines_table([json.loads(path.read_text()) for path in RECORDS]) in page
    page = (ROOT / "docs" / "migrating.md").read_text()
    assert programs_table([json.loads((FOLDER / "ttrl-cpu.json").read_text())]) in page


def test_a_program_has_both_scores_and_the_sampled_one_of_each_seed() -> None:
    row = programs_table([record(6, 6)]).splitlines()[2]
    assert row == "| `grpo.py` | 6 | .250 | .500 | .125 | .375 | .125 to .375, .125 to .375 |"


def test_runs_that_were_not_scored_by_sampling_have_no_table() -> None:
    old = record(6)
    del old["runs"][0]["after_sampled"]
    with pytest.raises(InvalidInputError, match="a run of grpo has no after_sampled; run it again, with this version"):
        programs_table([old])


def test_short_runs_have_the_steps_that_they_took() -> None:
    head, line, row = engines_table([record(6, 6)]).splitlines()[:3]
    assert "| step 1 | step 5 | score" in head
    assert head.count("|") == line.count("|") == row.count("|")


def test_runs_of_different_lengths_have_no_table() -> None:
    with pytest.raises(InvalidInputError, match="this table is of runs with the same steps, and the records have 5, 6"):
        engines_table([record(5, 6)])
