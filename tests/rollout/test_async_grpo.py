"""The example of asynchronous training, with a short imitation: two worker processes, and what it reports."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlcore.examples import async_grpo
from tests.rollout.simulated_engine import SimulatedEngine, SimulatedTrainer


class Says(SimulatedEngine):
    """Answers each text with one token."""

    def submit(self, prompts: Sequence[Any], sampling_params: Sequence[Any], *, max_in_flight: int) -> list[int]:
        return super().submit([[1] for _ in prompts], sampling_params, max_in_flight=max_in_flight)


@pytest.mark.parametrize(("stop_at", "steps"), [(0.6, 1), (0.9, 3)])
def test_a_task_whose_groups_hardly_teach_ends_the_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop_at: float, steps: int
) -> None:
    monkeypatch.setattr(async_grpo, "tokenizer_of", lambda path: None)
    monkeypatch.setattr(async_grpo.task, "max_answer_tokens", lambda tokenizer: 1)
    monkeypatch.setattr(async_grpo, "learn", lambda *_: None)
    groups = itertools.count()
    monkeypatch.setattr(async_grpo, "has_both", lambda trajectories: next(groups) % 4 == 0)
    train: Any = SimulatedTrainer()
    infer: Any = Says()
    run = async_grpo.reinforce(train, infer, 0, num_steps=3, seed=0, stop_at=stop_at)
    assert run["steps"] == steps
    told = "step 1 is the last: 7[0-9]% of its groups had equal rewards, which teach nothing"
    assert bool(re.search(told, capsys.readouterr().out)) == (steps == 1)


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
