"""Samples that are older than they need be teach less: with pacing a large bound of staleness costs nothing."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rollout.simulated_learning import STEP_S, Learned, Run, imitated

STEPS, HELD_OUT = 30, 512


@pytest.mark.slow
def test_a_large_bound_learns_as_a_small_one_and_hides_all_generation() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: runs that sample alike learn alike to the bit, in one process
    try:
        check_a_large_bound()
    finally:
        torch.set_num_threads(threads)


def check_a_large_bound() -> None:
    network = imitated(5)

    def learned(max_staleness: int, *, pacing: bool = True) -> Learned:
        return Run(network, 5, max_staleness=max_staleness, pacing=pacing, group_s=0.005).learn(steps=STEPS)

    synchronous, one, eight, full = learned(0), learned(1), learned(8), learned(8, pacing=False)
    assert (synchronous.staleness, one.staleness) == (0, eight.staleness) and eight.staleness < 1 and full.staleness > 5
    assert (one.steps, one.seconds, one.accuracy) == (eight.steps, eight.seconds, eight.accuracy), "the same program"
    # After the first batch the trainer never waits, with and without pacing: the clock adds the same steps to the same
    # wait, and the two first batches are of the same samples of the same network.
    assert full.seconds == eight.seconds, "older samples win no time"
    error = math.sqrt(0.5 * 0.5 / HELD_OUT)  # the largest standard error of an accuracy
    assert eight.accuracy > synchronous.accuracy - 3 * math.sqrt(2) * error
    generated_s = synchronous.seconds - STEPS * STEP_S
    hidden_s = synchronous.seconds - eight.seconds
    assert hidden_s > (STEPS - 2) / STEPS * generated_s  # all but that of the first batch, and a share for chance
