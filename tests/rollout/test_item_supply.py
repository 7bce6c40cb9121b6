"""The dataloader of a controller may be slow and be interrupted: nobody waits for it, no item is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlcore.rollout import RolloutClient, RolloutController, StalenessBound, Trajectory, Workflow
from rlcore.rollout.episode_queue import EpisodeQueue
from rlcore.rollout.item_supply import ItemSupply
from tests.rollout.simulated_engine import SimulatedEngine


class Odd(Workflow):
    """Rejects even items."""

    async def run_episode(self, client: RolloutClient, data: int) -> list[Trajectory] | None:
        await client.generate([1])
        return client.trajectories() if data % 2 else None


class Dataloader:
    """Gives 0 to 99, and calls ``at_item`` before each."""

    def __init__(self, at_item: Callable[[], object]) -> None:
        self._at_item = at_item

    def __iter__(self) -> Iterator[int]:
        for item in range(100):
            self._at_item()
            yield item


def supply_of(dataloader: Any, batch_size: int = 4) -> tuple[ItemSupply, EpisodeQueue]:
    queue = EpisodeQueue(StalenessBound(max_staleness=0, batch_size=batch_size))
    supply = ItemSupply(queue, threading.Condition(threading.RLock()))
    supply.use(dataloader)
    return supply, queue


def test_nobody_waits_for_a_dataloader_but_who_takes_its_items() -> None:
    """In prepare_batch, and in its wait, where others come for episodes that were rejected."""
    with (
        ThreadPoolExecutor() as threads,
        RolloutController(SimulatedEngine(), Odd(), batch_size=4, max_staleness=0) as rollout,
    ):
        dataloader = Dataloader(lambda: threads.submit(lambda: rollout.stats).result(timeout=5))
        episodes = rollout.prepare_episodes(dataloader, timeout_s=60)
        assert len(episodes) == 4 and all(one.data % 2 for one in episodes) and rollout.stats.rejected >= 3


def test_an_interrupt_before_an_item_is_queued_loses_none() -> None:
    """The wait for the controller's lock may take long."""
    supply, queue = supply_of(list(range(100)))
    changed = supply._changed
    entered = 0

    class Interrupts:
        def __enter__(self) -> None:
            nonlocal entered
            entered += 1
            if entered == 9:  # fill enters once, then twice an item; this is the end of the fourth
                raise KeyboardInterrupt
            changed.__enter__()

        def __exit__(self, *_: Any) -> None:
            changed.release()

    supply._changed = Interrupts()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        supply.fill()
    assert len(queue.queued) == 3 and queue.source.state_dict()["num_taken"] == 4
    with supply.at_rest():
        assert list(queue.queued) == [(0, 0), (1, 1), (2, 2), (3, 3)], "a state has what was taken"
    supply.fill()
    assert list(queue.queued) == [(number, number) for number in range(8)]


def test_states_have_each_item_once_while_several_threads_take_items() -> None:
    begun = threading.Barrier(4)
    supply, queue = supply_of(Dataloader(lambda: threading.Event().wait(0.0005)), batch_size=20)

    def fill() -> None:
        begun.wait()
        supply.fill()

    def states() -> list[tuple[int, int]]:
        begun.wait()
        found = []
        while not found or found[-1][0] < 40:
            with supply.at_rest():
                state = queue.snapshot()
            found.append((state.source.num_taken, len(state.queued)))
        return found

    with ThreadPoolExecutor() as threads:
        looking = threads.submit(states)
        for filling in [threads.submit(fill) for _ in range(3)]:
            filling.result(timeout=30)
        assert all(taken == queued for taken, queued in looking.result(timeout=30))
    assert list(queue.queued) == [(number, number) for number in range(40)], "in order, and no more than is short"
