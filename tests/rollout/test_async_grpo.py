"""The example of asynchronous training, with a short imitation: two worker processes, and what it reports."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from rlcore.examples import async_grpo


@pytest.mark.slow
def test_the_example_trains_beside_its_sampler_and_reports_staleness_and_idle_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(async_grpo, "IMITATION_STEPS", 80)
    monkeypatch.setattr(
        async_grpo, "has_both", lambda trajectories: True
    )  # so short an imitation has few right answers
    async_grpo.main(2, 8, 0, timeline=tmp_path / "timeline.json")
    told = capsys.readouterr().out
    histogram = {int(lag): int(n) for lag, n in re.findall(r"(\d+): (\d+)", told.partition("staleness -> ")[2])}
    assert sum(histogram.values()) == 8 * async_grpo.GROUPS and 0 < max(histogram) <= 2
    assert "0 failed, 0 timed out, 0 too stale" in told and re.search(r"idle: samplers \d+%; trainer \d+%", told)
    assert re.search(r"accuracy 0\.\d+ after 8 steps in ", told)
    spans = json.loads((tmp_path / "timeline.json").read_text())
    assert {(one["lane"], one["what"]) for one in spans} == {
        ("sampler 0", "generate"), ("trainer", "train"), ("trainer", "wait"), ("trainer", "sync")
    }  # fmt: skip
    for lane in ("sampler 0", "trainer"):
        own = [one for one in spans if one["lane"] == lane]
        assert all(one["end_s"] <= later["begin_s"] for one, later in pairwise(own)), "one thing at a time"
    training = [one for one in spans if one["what"] == "train"]
    generating = [one for one in spans if one["what"] == "generate"]
    both = [1 for t in training for g in generating if max(t["begin_s"], g["begin_s"]) < min(t["end_s"], g["end_s"])]
    assert both, "the sampler generates while the trainer trains"
