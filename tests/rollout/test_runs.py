"""Runs are the list that they stand for, and cost what their runs cost, not their entries."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from rlcore.engines.sampling.completion import Completion, RequestOutput, VersionSpan
from rlcore.rollout import Trajectory
from rlcore.rollout.runs import Runs, joined
from rlcore.rollout.trajectory import joined_turns

LONG = 10**9  # entries that nobody can look at one by one


def test_runs_are_the_list_that_they_stand_for() -> None:
    draw = random.Random(0)
    for _ in range(50):
        plain = [value for value in draw.choices([-1, 0, 3], k=6) for _ in range(draw.randrange(4))]
        runs: Sequence[int] = Runs.of(plain)
        assert runs == plain and plain == runs and list(runs) == plain and len(runs) == len(plain)
        assert [runs[i] for i in range(-len(plain), len(plain))] == plain + plain and runs[1:4] == plain[1:4]
        assert (
            Runs.of(plain) + Runs.of([3, 3]) == [*plain, 3, 3]
            and runs != [*plain, 3]
            and repr(Runs.of([3, 3])) == "Runs([(3, 2)])"
        )
        assert plain + Runs.of([3, 3]) == [*plain, 3, 3]
        assert joined([Runs.of(plain), Runs([(7, 2)])], np.int64).tolist() == [*plain, 7, 7]
        with pytest.raises(IndexError):
            runs[len(plain)]


def test_what_is_asked_of_a_trajectory_does_not_read_its_tokens() -> None:
    one = Trajectory.of([], Completion([5], [-1.0], "", "stop", (VersionSpan(3, 0, 1),)))
    object.__setattr__(one, "loss_mask", Runs([(False, LONG), (True, LONG)]))
    object.__setattr__(one, "versions", Runs([(1, 0), (-1, LONG), (4, LONG), (2, 1)]))
    assert one.num_sampled == LONG and one.oldest_version == 2 and one.versions[LONG] == 4


def test_a_trajectory_of_lists_is_that_of_spans_and_its_plain_data_are_lists() -> None:
    spans = VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)
    of_spans = Trajectory.of([8, 9], Completion([5, 6, 7], [-1.0, -2.0, -3.0], "", "length", spans), reward=2.0)
    mask, versions = [False, False, True, True, True], [-1, -1, 3, 3, 4]
    of_lists = Trajectory([8, 9, 5, 6, 7], mask, [0.0, 0.0, -1.0, -2.0, -3.0], versions, 2.0, {"text": ""})
    assert of_spans == of_lists and (of_lists.oldest_version, of_lists.num_sampled) == (3, 3)
    plain = of_spans.plain()
    assert type(plain["loss_mask"]) is type(plain["versions"]) is list
    assert (plain["loss_mask"], plain["versions"]) == (mask, versions)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(plain)), Trajectory) == of_spans


def test_plain_data_take_no_python_call_for_each_token() -> None:
    calls: list[str] = []
    size = 1000
    long = Trajectory([1] * size, [True] * size, [0.0] * size, [0] * size, extra={"text": ""})
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        long.plain()
    finally:
        sys.setprofile(None)
    assert len(calls) < 50 < size, calls[:50]


def test_the_sequences_of_a_group_copy_no_prompt_to_see_that_none_continues_another() -> None:
    slices = 0

    class Prompt(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal slices
            slices += isinstance(index, slice)
            return super().__getitem__(index)

    group = [Completion([one], [-1.0], "", "length", (VersionSpan(0, 0, 1),)) for one in range(8)]
    assert len(joined_turns([RequestOutput(None, Prompt([1, 2, 3]), group)])) == 8
    assert slices == 0
