"""The staleness bound as a pure class, under random events."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rlcore.errors import InvalidInputError
from rlcore.rollout import StalenessBound
from rlcore.rollout.pacing import Pacing


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


def test_what_is_given_is_read_once_and_not_for_each_episode() -> None:
    """With 512 episodes a version and a bound of 8 it took 144 ms, in which no episode could end."""
    reads = 0

    class Given(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal reads
            reads += 1
            return super().__iter__()

    bound = StalenessBound(max_staleness=1, batch_size=2)
    for number in range(4):
        bound.begin(number)
    assert bound._num_late_after(Given([0, 1])) == 0 and reads == 1


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


def steps_of_work(
    *, step_s: float, episode_s: float, at_once: int, max_staleness: int = 8
) -> tuple[list[int], list[float], Pacing]:
    """Return the staleness of each step and the seconds that its trainer waited, on a clock of its own.

    Args:
        step_s: of the trainer.
        episode_s: of an episode, with as many beside it as the samplers do at once; more take their turns.
    """
    bound = StalenessBound(max_staleness=max_staleness, batch_size=4)
    pacing = Pacing(bound)
    clock, next_number, lags, waits = 0.0, 0, list[int](), list[float]()
    free_at = [0.0] * at_once
    ends_at: dict[int, float] = {}

    def go_on(until: float) -> None:
        nonlocal next_number, clock
        while True:
            while bound.capacity:
                slot = min(range(at_once), key=free_at.__getitem__)
                bound.begin(next_number)
                ends_at[next_number] = free_at[slot] = max(free_at[slot], clock) + episode_s
                next_number += 1
            first = min(ends_at, key=ends_at.__getitem__, default=None)
            if first is None or ends_at[first] > until:
                clock = max(clock, until)
                return
            clock = max(clock, ends_at.pop(first))
            assert bound.end(first)

    for _ in range(60):
        go_on(clock)
        pacing.note_wait(4)
        came = clock
        while not (chosen := bound.choose(4)):
            go_on(min(ends_at.values()))
        waits.append(clock - came)
        lags.append(max(bound.version - bound.ready[number] for number in chosen))
        bound.give(chosen)
        go_on(clock + step_s)
        pacing.note_version()
        assert bound.set_version(bound.version + 1) == []
        assert 4 <= bound.ahead <= 4 * max_staleness
    return lags, waits, pacing


def test_pacing_runs_ahead_as_far_as_long_episodes_need_and_no_further() -> None:
    lags, waits, _ = steps_of_work(step_s=1.0, episode_s=0.1, at_once=4)
    assert set(lags[1:]) == {1} and max(waits[1:]) == 0, "fast samplers: one version, and nobody waits"
    lags, waits, _ = steps_of_work(step_s=1.0, episode_s=3.5, at_once=100)
    assert max(waits[30:]) == 0 and max(lags[30:]) == 4, "an episode that takes 3.5 steps: four versions, and no wait"
    lags, waits, _ = steps_of_work(step_s=1.0, episode_s=3.5, at_once=100, max_staleness=2)
    assert max(lags) == 2 and min(waits[30:]) >= 0 and max(waits[30:]) > 0, "the bound comes first"


def test_one_shortage_changes_no_pace_and_a_standing_queue_does() -> None:
    _, _, pacing = steps_of_work(step_s=1.0, episode_s=0.1, at_once=4)
    assert pacing._bound.ahead == 4
    bound = pacing._bound
    for slack in (-3, *[0] * 9):
        pacing._slack = slack
        pacing.note_version()
    assert bound.ahead == 4
    for slack in (-3, -2):
        pacing._slack = slack
        pacing.note_version()
    assert bound.ahead == 6
    for slack in [5, 0, *[2] * 8]:
        pacing._slack = slack
        pacing.note_version()
    assert bound.ahead == 6, "the queue was empty once in nine versions"
    pacing._slack = 1
    pacing.note_version()
    assert bound.ahead == 5
