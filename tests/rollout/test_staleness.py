"""The staleness bound as a pure class, under random events."""

from __future__ import annotations

import random

import pytest

from rlcore.errors import InvalidInputError
from rlcore.rollout import StalenessBound


def areal_capacity(bound: StalenessBound, accepted: int) -> int:
    """AReaL's ``StalenessManager.get_capacity``, word for word."""
    running = len(bound.running)
    concurrency = (bound.max_concurrent or 1 << 30) - running
    return min(concurrency, (bound.max_staleness + bound.version + 1) * bound.batch_size - (accepted + running))


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("max_concurrent", [None, 5])
def test_with_random_delays_the_bound_holds_and_nothing_is_thrown_away(
    max_staleness: int, max_concurrent: int | None
) -> None:
    """10,000 episodes in all over the parameters, some rejected, some of which take a hundred times as long."""
    draw, batch_size, given, next_number, accepted = random.Random(max_staleness), 4, 0, 0, 0
    bound = StalenessBound(max_staleness=max_staleness, batch_size=batch_size, max_concurrent=max_concurrent)
    ends_at: dict[int, int] = {}
    for clock in range(1_000_000):
        assert bound.capacity == max(0, areal_capacity(bound, accepted))
        while bound.capacity and draw.random() < 0.7:
            bound.begin(next_number)
            ends_at[next_number] = clock + (100 if draw.random() < 0.05 else draw.randrange(8))
            next_number += 1
        for number in [number for number, end in ends_at.items() if end <= clock]:
            del ends_at[number]
            if draw.random() < 0.1:
                bound.drop(number)
            else:
                assert bound.end(number)
                accepted += 1
        if draw.random() < 0.5 and (chosen := bound.choose(batch_size)):
            ages = [bound.version - bound.ready[number] for number in chosen]
            assert min(ages) >= 0 and max(ages) <= max_staleness
            bound.give(chosen)
            given += batch_size
            assert bound.set_version(bound.version + 1) == []
            if given >= 1000:
                break
    assert given == 1000


def test_a_later_episode_overtakes_only_while_the_earlier_one_has_time() -> None:
    bound = StalenessBound(max_staleness=1, batch_size=2)
    for number in range(4):
        bound.begin(number)
    assert bound.capacity == 0
    for number in (2, 3):
        bound.end(number)
    assert bound.choose(2) == [2, 3]  # 0 and 1 have another version
    bound.give([2, 3])
    assert bound.set_version(1) == [] and bound.capacity == 2
    for number in (4, 5):
        bound.begin(number)
        bound.end(number)
    assert bound.choose(2) == []  # 0 and 1, which still run, would be too old for the next batch
    bound.end(0)
    assert bound.choose(2) == []
    bound.end(1)
    assert bound.choose(2) == [0, 1]


def test_what_no_order_can_save_is_named_and_forgotten() -> None:
    bound = StalenessBound(max_staleness=1, batch_size=2)
    for number in range(4):
        bound.begin(number)
    bound.end(0)
    assert bound.set_version(1) == []
    assert sorted(bound.set_version(2)) == [0, 1, 2, 3]  # the trainer took none in two versions
    assert bound.capacity == 4 and not bound.ready and not bound.running
    bound.begin(4)
    assert bound.end(4, oldest_version=0) is False  # it says that its tokens are older than it is


def test_wrong_values_are_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="takes a whole number of at least 0 as max_staleness, got -1"):
        StalenessBound(max_staleness=-1, batch_size=1)
    with pytest.raises(InvalidInputError, match="takes a whole number of at least 1 as batch_size, got 0"):
        StalenessBound(max_staleness=1, batch_size=0)
    bound = StalenessBound(max_staleness=0, batch_size=1)
    bound.set_version(3)
    with pytest.raises(InvalidInputError, match="at least 3, the version of now, got 2"):
        bound.set_version(2)
    bound.begin(0)
    with pytest.raises(InvalidInputError, match="episode 1 must not begin: the capacity is 0"):
        bound.begin(1)
