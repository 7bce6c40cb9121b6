"""Samples that are older than they need be teach less: with pacing a large bound of staleness costs nothing."""

from __future__ import annotations

import math

import pytest

from tests.rollout.simulated_learning import STEP_S, Learned, Run, imitated

STEPS, HELD_OUT = 30, 512


@pytest.mark.slow
def test_a_large_bound_learns_as_a_small_one_and_hides_all_generation() -> None:
    network = imitated(5)

    def learned(max_staleness: int, *, pacing: bool = True) -> Learned:
        return Run(network, 5, max_staleness=max_staleness, pacing=pacing, group_s=0.005).learn(steps=STEPS)

    synchronous, one, eight, full = learned(0), learned(1), learned(8), learned(8, pacing=False)
    assert (synchronous.staleness, one) == (0, eight) and eight.staleness < 1 and full.staleness > 5
    assert full.seconds == eight.seconds, "older samples win no time"
    error = math.sqrt(0.5 * 0.5 / HELD_OUT)  # the largest standard error of an accuracy
    assert eight.accuracy > synchronous.accuracy - 3 * math.sqrt(2) * error
    generated_s = synchronous.seconds - STEPS * STEP_S
    hidden_s = synchronous.seconds - eight.seconds
    assert hidden_s > (STEPS - 2) / STEPS * generated_s  # all but that of the first batch, and a share for chance
