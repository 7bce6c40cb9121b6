"""The controller over simulated engines: order, counts, failures, and what is kept when a program ends."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import (
    InvalidInputError,
    RolloutError,
    RolloutTimeoutError,
    StateError,
    SyncError,
    UnsupportedError,
)
from rlcore.rollout import RolloutClient, RolloutController, StalenessBound, Trajectory, Workflow, fleet, timeline
from rlcore.rollout.engine_driver import Request
from rlcore.rollout.episode import Episode, EpisodeEnd, Outcome
from rlcore.rollout.episode_queue import EpisodeQueue
from rlcore.rollout.stats import RolloutStats
from tests.rollout.simulated_engine import SimulatedEngine, SimulatedTrainer


class Steps(Workflow):
    """Samples as many tokens as the item says; the reward is the item."""

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory]:
        await client.generate([data + 1, 1])
        return client.trajectories(reward=float(data))


class Acts(Workflow):
    """Does what the item says."""

    async def run_episode(self, client: RolloutClient, data: str) -> Any:
        await client.generate([1])
        match data:
            case "raise":
                raise ValueError("planted")
            case "reject":
                return None
            case "hang":
                await asyncio.Event().wait()
            case "exit":
                sys.exit("planted")
            case "exit in a task":
                await asyncio.create_task(exits())
            case "group":
                raise BaseExceptionGroup("planted", [SystemExit()])
            case "fail":
                pytest.fail("planted")
            case "cancel":
                raise asyncio.CancelledError
            case "lie":
                return "no trajectory"
        return client.trajectories()


async def exits() -> None:
    sys.exit("planted")


def never_held_up(rollout: RolloutController, first: int) -> None:
    """From this one on no engine counts as silent, however long a busy machine holds it up: the deadlines here are
    short."""
    for driver in rollout._fleet._drivers[first:]:
        driver.stuck_s = lambda: 0.0  # type: ignore[method-assign]


class Computes:
    """A workflow that awaits nothing."""

    def run_episode(self, client: RolloutClient, data: Any) -> int:
        return 3


@contextmanager
def controller(engine: Any = None, workflow: Workflow | None = None, **options: Any) -> Iterator[RolloutController]:
    found = RolloutController(engine or SimulatedEngine(), workflow or Steps(), **{"batch_size": 4} | options)
    try:
        yield found
    finally:
        found.close()


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.002)


def assert_ended(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("max_staleness", [0, 2, *(pytest.param(most, marks=pytest.mark.slow) for most in (1, 4))])
def test_no_token_is_staler_than_the_bound_and_none_is_thrown_away(max_staleness: int) -> None:
    draw, trainer = random.Random(1), SimulatedTrainer()
    items = [draw.choice([1, 2, 3, 60]) for _ in range(1000)]
    engines = [SimulatedEngine(seed=seed) for seed in range(2)]
    with controller(engines, max_staleness=max_staleness) as rollout:
        for step in range(60):
            batch = rollout.prepare_batch(items, timeout_s=60)
            sampled = batch["versions"][batch["loss_mask"]]
            assert step - max_staleness <= int(sampled.min()) and int(sampled.max()) <= step
            assert int((batch["versions"] >= 0).sum()) == int(batch["loss_mask"].sum())
            rollout.update_weights(trainer)
        stats = rollout.stats
    assert stats.given == 240 == sum(stats.staleness.values()) and max(stats.staleness) <= max_staleness
    assert (stats.tokens_discarded, stats.too_stale, stats.failed) == (0, 0, 0)
    assert "staleness -> episodes: 0: " in str(stats) or max_staleness


class Delayed(Workflow):
    """Waits before it samples; some episodes fail."""

    async def run_episode(self, client: RolloutClient, data: tuple[int, float, bool]) -> list[Trajectory]:
        length, delay_s, fails = data
        await asyncio.sleep(delay_s)
        await client.generate([length, 1])
        if fails:
            raise ValueError("planted")
        return client.trajectories()


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 8])
def test_the_bound_holds_for_ten_thousand_episodes_with_random_delays(
    max_staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    """2,000 episodes each, over two simulated engines; 5 % fail, and the trainer takes a random time, too."""
    caplog.set_level(logging.ERROR)
    draw, trainer = random.Random(max_staleness), SimulatedTrainer()
    items = [
        [(draw.choice([1, 2, 3, 60]), draw.choice([0, 0, 0.001, 0.02]), draw.random() < 0.05)] for _ in range(5000)
    ]
    with controller(
        [SimulatedEngine(), SimulatedEngine()], Delayed(), batch_size=8, max_staleness=max_staleness, pacing=False
    ) as rollout:
        for step in range(250):
            batch = rollout.prepare_batch(items, timeout_s=300)
            sampled = batch["versions"][batch["loss_mask"]]
            assert step - max_staleness <= int(sampled.min()) and int(sampled.max()) <= step
            time.sleep(draw.choice([0, 0, 0.01]))
            rollout.update_weights(trainer)
        stats = rollout.stats
    assert (stats.given, stats.too_stale) == (2000, 0) and stats.failed > 50
    assert max(stats.staleness) == max_staleness, "the samplers run ahead as far as they may"


@pytest.mark.parametrize(("pacing", "staleness"), [(True, {0: 4, 1: 36}), (False, {0: 4, 1: 4, 2: 4, 3: 4, 4: 24})])
def test_samplers_that_are_faster_than_the_trainer_run_ahead_no_further_than_it_needs(
    pacing: bool, staleness: dict[int, int]
) -> None:
    trainer, items = SimulatedTrainer(), [1]
    with controller(max_staleness=4, pacing=pacing) as rollout:
        for _ in range(10):
            rollout.prepare_batch(items, timeout_s=60)
            until(lambda: not rollout._bound.running and not rollout._bound.capacity)
            rollout.update_weights(trainer)
        assert rollout.stats.staleness == staleness


def test_with_pacing_as_many_episodes_may_be_waited_for_as_the_bound_lets_begin() -> None:
    with controller(max_staleness=3) as rollout:
        for _ in range(17):
            rollout.submit(1)
        assert len(rollout.wait(16)) == 16  # without a deadline
        assert len(rollout.wait(1)) == 1


def test_the_work_for_a_request_does_not_grow_with_the_requests_that_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads of a request's size are counted: to find the engine with least to do all were added up for each new one."""
    reads: list[str] = []  # by several threads: appending loses none

    class Counted(Request):
        def __getattribute__(self, name: str) -> Any:
            if name == "tokens":
                reads.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(fleet, "Request", Counted)
    endless = 10**9
    with controller([SimulatedEngine(), SimulatedEngine()], max_staleness=0, batch_size=200) as rollout:
        drivers = rollout._fleet._drivers
        for steps in [endless] * 50 + [1] * 150:
            rollout.submit(steps)
        assert {one.data for one in rollout.wait(150)} == {1}
        one = Request([1, 1], SamplingParams(), len).tokens
        assert sum(driver.tokens_under_way for driver in drivers) == 50 * one
        rollout.pause()
        rollout.update_weights(SimulatedTrainer(), version=9)  # cancels what runs
        until(lambda: not any(driver.tokens_under_way for driver in drivers))
    assert len(reads) == 2 * 200, "once when it comes and once when it goes"


def test_the_versions_of_an_episode_are_read_once() -> None:
    """That takes time for each token; staleness is asked of an episode when it ends, when it is given, and later."""
    reads = 0

    class Versions(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal reads
            reads += 1
            return super().__iter__()

    queue = EpisodeQueue(StalenessBound(max_staleness=0, batch_size=1))
    queue.add("item")
    number, data = queue.begin()
    episode = Episode(number, data, [Trajectory([1, 2], [False, True], [0.0, -1.0], Versions([-1, 0]))])
    queue.end(EpisodeEnd(episode, "ended", 1), is_direct=False)
    assert queue.give([number]) == [episode] and episode.oldest_version == 0 and queue.staleness == {0: 1}
    assert reads == 1


def test_generation_is_hidden_behind_training_though_neither_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(timeline, "time", SimpleNamespace(monotonic=lambda: now))
    noted = timeline.Timeline()

    def hidden() -> float:
        who: Any = {"lanes": ["sampler 0"], "trainer": "trainer", "lent": "lent"}
        return RolloutStats.of({}, {}, noted, engine_failures=0, requests_moved=0, **who).hidden

    assert hidden() == 0.0
    noted.begin("sampler 0", "generate")
    noted.begin("trainer", "train")
    now = 4.0
    assert hidden() == 1.0
    noted.begin("trainer", "wait")
    now = 6.0
    noted.begin("trainer", "train")
    now = 8.0
    assert hidden() == 0.75
    noted.end("sampler 0")
    now = 16.0
    assert hidden() == 0.75, "the sampler no longer generates"


def test_an_update_does_not_wait_for_the_longest_sequence_which_goes_on_with_the_new_weights() -> None:
    engine, trainer = SimulatedEngine(step_s=0.001), SimulatedTrainer()
    with controller(engine, batch_size=2, max_staleness=2) as rollout:
        for steps in (400, 1, 1):
            rollout.submit(steps)
        assert [one.data for one in rollout.wait(2)] == [1, 1]
        assert rollout.update_weights(trainer) == "synced version 1"
        assert engine.num_under_way == 1
        rollout.submit(1)
        long, short = rollout.wait(2)
    versions = long.trajectories[0].versions
    assert len(versions) == 403 and versions[:2] == [-1, -1] and set(versions[2:]) == {0, 1}
    assert versions[2:] == sorted(versions[2:])
    assert (long.data, long.oldest_version, short.data) == (400, 0, 1)


def test_an_episode_that_fails_is_dropped_and_counted_and_another_comes_in_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    items = ["raise", "good", "reject", "good", "lie", "good", "hang", "good"]
    with caplog.at_level(logging.WARNING), controller(workflow=Acts(), episode_timeout_s=0.2) as rollout:
        batch = rollout.prepare_batch(items, timeout_s=60)
        assert len(batch["rewards"]) == 4 and batch["group"].tolist() == [0, 1, 2, 3]
        until(lambda: rollout.stats.timed_out)
        stats = rollout.stats
    assert min(stats.failed, stats.rejected, stats.timed_out) >= 1 and stats.given == 4
    assert stats.tokens_discarded >= stats.failed + stats.timed_out and stats.tokens_rejected == stats.rejected
    assert "ValueError: planted; item 'raise'" in caplog.text
    assert "timed_out: RolloutTimeoutError: it took longer than episode_timeout_s=0.2; item 'hang'" in caplog.text
    assert "must return a Trajectory, a list of them, or None to reject; got 'no trajectory'" in caplog.text


def test_who_rejects_all_is_told_so_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    items = ["reject"]
    with caplog.at_level(logging.WARNING), controller(workflow=Acts()) as rollout:
        while rollout.stats.rejected < 256:
            with pytest.raises(RolloutTimeoutError):
                rollout.prepare_batch(items, timeout_s=0.05)
    told = [line for line in caplog.messages if "in a row were rejected, by the workflow or by accept (100 %" in line]
    assert [int(line.split()[0]) for line in told][:3] == [64, 128, 256]


def test_who_rejects_nearly_all_is_told_each_number_once_with_the_share(caplog: pytest.LogCaptureFixture) -> None:
    """A task that is nearly solved has hundreds of such rows, with a group that teaches after each."""
    with caplog.at_level(logging.WARNING), controller(workflow=Acts()) as rollout:
        for row in (70, 70, 130, 100, 130):
            for _ in range(row):
                rollout._note_end(EpisodeEnd(Episode(9, "one", []), "rejected", 1))
            rollout._note_end(EpisodeEnd(Episode(9, "one", []), "failed", 1, ValueError()))
            rollout._episodes.counts["ended"] += 1
    assert [int(line.split()[0]) for line in caplog.messages] == [64, 128]
    assert "128 episodes in a row were rejected, by the workflow or by accept (99 % of all that ended" in caplog.text
    assert "the task is nearly solved or far too hard: stop, or give other items" in caplog.text


def test_a_cancelled_episode_is_no_rejection_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), controller(workflow=Acts()) as rollout:
        rollout._episodes.rejections_in_row = 64
        rollout._note_end(EpisodeEnd(Episode(9, "one", []), "cancelled", 1))
        assert not caplog.messages
        rollout._episodes.rejections_in_row = 63
        rollout._note_end(EpisodeEnd(Episode(9, "one", []), "rejected", 1))
    assert caplog.messages[0].startswith("64 episodes in a row were rejected")


@pytest.mark.parametrize(
    ("workflow", "item", "told"),
    [
        (Acts(), "exit", "SystemExit: planted"),
        (Acts(), "group", "BaseExceptionGroup: planted (1 sub-exception)"),
        (Acts(), "fail", "Failed: planted"),
        (Acts(), "exit in a task", "SystemExit: planted"),
        (Acts(), "cancel", "RolloutError: the workflow has cancelled itself"),
        (Computes(), "compute", "InvalidInputError: run_episode() must be `async def`; it returned 3"),
    ],
)
def test_a_workflow_that_ends_in_an_odd_way_has_failed_and_stops_nothing(workflow: Any, item: str, told: str) -> None:
    with controller(workflow=workflow, max_failures_in_row=2) as rollout:
        for _ in range(2):
            with pytest.raises(RolloutError, match=f"none of 2 episodes ended well: {re.escape(told)}"):
                rollout.rollout_batch([item] * 2, timeout_s=60)
        with pytest.raises(RolloutError, match=f"have failed in a row, the last one with {re.escape(told)}"):
            rollout.prepare_batch([item], timeout_s=60)
        assert len(rollout.evaluate(["good"], Acts())) == 1


def test_an_episode_that_does_not_let_itself_be_cancelled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.rollout.controller._CLOSE_S", 0.05)
    began, may_end = threading.Event(), threading.Event()

    class Blocks(Workflow):
        async def run_episode(self, client: RolloutClient, data: Any) -> None:
            began.set()
            may_end.wait()

    before = set(threading.enumerate())
    rollout = RolloutController(SimulatedEngine(), Blocks(), batch_size=4)
    rollout.submit(1)
    began.wait()
    with pytest.raises(
        RolloutTimeoutError, match=r"episodes that close\(\) cancelled go on after 0.05 s; a workflow must"
    ):
        rollout.close()
    may_end.set()
    assert_ended(set(threading.enumerate()) - before)


def test_an_engine_that_stands_still_goes_on_after_close() -> None:
    engine = SimulatedEngine()
    with controller(engine) as rollout, rollout.generation_paused():
        rollout.close()
    assert not engine._is_paused


def test_direct_episodes_and_those_of_training_each_tell_their_own_failures() -> None:
    with controller(workflow=Acts(), batch_size=1) as rollout:
        rollout.submit("lie")
        until(lambda: rollout.stats.failed)
        with pytest.raises(RolloutError, match=r"none of 2 episodes ended well: they were rejected$"):
            rollout.evaluate(["reject", "reject"])
        with pytest.raises(RolloutError, match=r"none of 2 episodes ended well: ValueError: planted$") as failed:
            rollout.evaluate(["raise", "reject"])
        assert str(failed.value.__cause__) == "planted"
        with pytest.raises(StateError, match=r"the last one with InvalidInputError: run_episode\(\) must return"):
            rollout.wait(1)


def test_an_engine_has_one_controller_at_a_time() -> None:
    engine = SimulatedEngine()
    for _ in range(2):
        with controller(engine) as rollout:
            with pytest.raises(StateError, match=r"another RolloutController has this inference engine; close\(\) it"):
                RolloutController(engine, Steps(), batch_size=1)
            assert len(rollout.rollout_batch([1])["rewards"]) == 1


@dataclass
class Unhashable(SimulatedEngine):
    """An engine of one's own that compares by its fields, of which there are none."""

    def __post_init__(self) -> None:
        super().__init__()


class Slotted:
    """An engine of one's own that weak references cannot refer to."""

    __slots__ = ("_engine", "version")

    def __init__(self) -> None:
        self._engine, self.version = SimulatedEngine(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize("kind", [Unhashable, Slotted])
def test_an_engine_of_any_class_has_one_controller_at_a_time(kind: Callable[[], Any]) -> None:
    engine = kind()
    with controller([engine, kind()]) as rollout:
        with pytest.raises(StateError, match="another RolloutController has this inference engine"):
            RolloutController(engine, Steps(), batch_size=1)
        assert len(rollout.rollout_batch([1])["rewards"]) == 1
    with controller(engine) as rollout:
        rollout.rollout_batch([1])


def test_a_controller_that_cannot_begin_keeps_no_thread_and_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor can another one begin meanwhile."""
    engine, before = SimulatedEngine(), set(threading.enumerate())

    def cannot_begin(*_: Any, **__: Any) -> None:
        with pytest.raises(StateError, match="another RolloutController has this inference engine"):
            RolloutController(engine, Steps(), batch_size=1)
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("rlcore.rollout.controller.EpisodeRunner", cannot_begin)
        with pytest.raises(OSError, match="too many open files"):
            RolloutController(engine, Steps(), batch_size=1)
    assert_ended(set(threading.enumerate()) - before)
    with controller(engine) as rollout:
        rollout.rollout_batch([1])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_close_that_fails_gives_the_engines_back_all_the_same(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, before = [SimulatedEngine(), SimulatedEngine(), SimulatedEngine()], set(threading.enumerate())

    def fails(numbers: Sequence[int] | None = None) -> int:
        raise error("planted")

    rollout = RolloutController(engines, Steps(), batch_size=1)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(engines[1], "abort", fails)
        with pytest.raises(error, match="planted"):
            rollout.close()
    rollout.close()
    assert_ended(set(threading.enumerate()) - before)
    with controller(engines) as another:
        rollout.close()  # again, which does not take them from the other
        with pytest.raises(StateError, match="another RolloutController has this inference engine"):
            RolloutController(engines[1], Steps(), batch_size=1)  # type: ignore[arg-type]
        another.rollout_batch([1])


def test_a_wait_says_what_failed() -> None:
    with controller(workflow=Acts()) as rollout:
        rollout.submit("raise")
        until(lambda: rollout.stats.failed)
        failed = re.escape("(1 have failed in a row, the last one with ValueError: planted)")
        with pytest.raises(RolloutTimeoutError, match=f"0 run {failed}; call it again"):
            rollout.wait(1, timeout_s=0)
        with pytest.raises(StateError, match=f"not given yet {failed}; submit"):
            rollout.wait(1)


def test_an_iterator_has_one_pass() -> None:
    told = "has no items left: an iterator has one pass; give a list"
    with controller(batch_size=2) as rollout, pytest.raises(InvalidInputError, match=told):
        rollout.prepare_batch(iter([1]))


def test_too_many_failures_in_a_row_end_the_wait_with_the_last_one() -> None:
    with controller(workflow=Acts(), max_failures_in_row=6) as rollout:
        with pytest.raises(
            RolloutError, match=r"\d+ episodes have failed in a row, the last one with ValueError: planted"
        ):
            rollout.prepare_batch(["raise"], timeout_s=60)
        with pytest.raises(RolloutError, match="none of 1 episodes ended well: ValueError: planted"):
            rollout.rollout_batch(["raise"])


def test_a_wait_after_too_many_failures_tries_again() -> None:
    class Flaky(Workflow):
        is_down = True

        async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory]:
            if self.is_down:
                await asyncio.sleep(0.01)  # so episodes that begin when the error is raised fail after it
                raise ValueError("planted")
            await client.generate([1])
            return client.trajectories()

    workflow, items = Flaky(), list(range(100))
    with controller(workflow=workflow, batch_size=2, max_failures_in_row=3) as rollout:
        with pytest.raises(RolloutError, match="have failed in a row"):
            rollout.prepare_episodes(items, timeout_s=60)
        time.sleep(0.3)
        workflow.is_down = False
        assert len(rollout.prepare_episodes(items, timeout_s=60)) == 2


def test_failures_of_direct_episodes_do_not_end_a_wait_of_training() -> None:
    items = ["ok"] * 4
    with controller(workflow=Acts(), batch_size=1, max_failures_in_row=3) as rollout:
        for run in (rollout.evaluate, rollout.rollout_episodes):
            with pytest.raises(RolloutError, match="none of 3 episodes ended well: ValueError: planted"):
                run(["raise"] * 3)
            assert len(rollout.prepare_episodes(items, timeout_s=60)) == 1


def test_a_direct_episode_that_ends_well_is_no_end_of_failures_in_a_row() -> None:
    queue = EpisodeQueue(StalenessBound(max_staleness=0, batch_size=1))
    for number, (error, is_direct) in enumerate([(ValueError(), False), (None, True), (ValueError(), False)]):
        outcome: Outcome = "failed" if error else "ended"
        queue.end(EpisodeEnd(Episode(number, 0, []), outcome, 0, error), is_direct=is_direct)
    assert queue.failures_in_row == 2


def test_a_synchronous_batch_is_in_the_order_of_its_items_and_needs_no_capacity() -> None:
    with controller(max_staleness=0, batch_size=1, accept=lambda group: group[0].reward != 2) as rollout:
        batch = rollout.rollout_batch([5, 1, 2, 3])
        assert batch["rewards"].tolist() == [5, 1, 3] and rollout.stats.staleness == {0: 3}
        assert [one.data for one in rollout.evaluate([2, 1])] == [2, 1] and rollout.stats.given == 3
        with pytest.raises(RolloutTimeoutError, match=r"0 of 1 episodes ended within 0\.05 s"):
            rollout.rollout_batch([1 << 30], timeout_s=0.05)
        until(lambda: not rollout._runner.num_running)


def test_calls_that_cannot_succeed_say_why() -> None:
    engine = SimulatedEngine()
    with controller(engine, max_staleness=0) as rollout:
        rollout.submit(1)
        with pytest.raises(StateError, match=r"wait\(4\) would wait for ever: only 1 episodes were submitted"):
            rollout.wait()
        with pytest.raises(RolloutTimeoutError, match=r"wait\(4\) has \d episodes after 0.05 s"):
            rollout.wait(timeout_s=0.05)
        for _ in range(7):
            rollout.submit(1)
        assert len(rollout.wait()) == 4
        with pytest.raises(StateError, match="bound of 0 lets no more begin; call update_weights"):
            rollout.wait()
        rollout.pause()
        with pytest.raises(StateError, match="the controller is paused; call resume"):
            rollout.wait()
        rollout.resume()
        with pytest.raises(InvalidInputError, match=r"must be the version that the engines serve, \[0\]"):
            rollout.set_version(1)
        with pytest.raises(InvalidInputError, match="a version of at least 0, the version of now, got -1"):
            rollout.update_weights(SimulatedTrainer(), version=-1)
        with pytest.raises(InvalidInputError, match="needs at least one item"):
            rollout.rollout_batch([])
        with rollout.generation_paused() as engines:
            assert engines == [engine]
            engine.version = 1
            rollout.set_version(1)
        assert len(rollout.wait()) == 4
    with controller() as rollout, pytest.raises(InvalidInputError, match="has no items"):
        rollout.prepare_batch([])
    with pytest.raises(StateError, match="the RolloutController is closed"):
        rollout.submit(1)
    with pytest.raises(InvalidInputError, match="takes a Workflow, with `async def run_episode"):
        RolloutController(engine, print, batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="takes an InferenceEngine or several different ones"):
        RolloutController([engine, engine], Steps(), batch_size=1)


def test_ctrl_c_in_wait_takes_nothing_and_close_leaves_no_thread_and_no_request() -> None:
    engine = SimulatedEngine(step_s=0.001)
    before = set(threading.enumerate())
    rollout = RolloutController(engine, Steps(), batch_size=2)
    for steps in (1, 1 << 30):
        rollout.submit(steps)
    until(lambda: rollout._episodes.ready)
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        rollout.wait(2)
    assert len(rollout.wait(1)) == 1
    rollout.close()
    rollout.close()
    assert engine.num_under_way == 0 and engine.num_aborted == 1
    assert_ended(set(threading.enumerate()) - before)


def test_ctrl_c_while_the_loop_is_woken_for_new_episodes_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with controller() as rollout:
        for _ in range(2):
            rollout.submit(1)
        until(lambda: len(rollout._episodes.ready) == 2)
        with monkeypatch.context() as planted, pytest.raises(KeyboardInterrupt):
            planted.setattr(rollout._runner._loop, "call_soon_threadsafe", interrupted)
            rollout.wait(2)
        assert rollout.stats.given == 0 and sorted(one.number for one in rollout.wait(2)) == [0, 1]


def test_a_batch_that_another_thread_waits_for_ends_with_the_controller() -> None:
    told: list[str] = []

    def wait(rollout: RolloutController) -> None:
        try:
            rollout.rollout_batch([10**9])
        except StateError as error:
            told.append(str(error))

    engine = SimulatedEngine(step_s=0.001)
    with controller(engine) as rollout:
        waiting = threading.Thread(target=wait, args=(rollout,), daemon=True)
        waiting.start()
        until(lambda: engine.num_under_way)
    waiting.join(60)
    assert told == ["rollout_batch() is refused: the RolloutController is closed; make another"]


def test_a_program_with_an_event_loop_of_its_own_awaits_batches() -> None:
    async def program() -> list[int]:
        for steps in (3, 1):
            rollout.submit(steps)
        return [one.number for one in await rollout.wait_async(2)]

    with controller() as rollout:
        assert sorted(asyncio.run(program())) == [0, 1]


def test_a_task_that_is_cancelled_in_wait_async_takes_nothing_and_keeps_no_thread() -> None:
    async def program() -> list[int]:
        for _ in range(2):
            rollout.submit(300)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rollout.wait_async(2), 0.05)
        await asyncio.to_thread(until, lambda: len(rollout._episodes.ready) == 2)
        return [one.number for one in await rollout.wait_async(2, timeout_s=30)]

    async def waits_for_ever() -> None:
        rollout.submit(1 << 30)
        await rollout.wait_async(1)

    with controller(SimulatedEngine(step_s=0.001)) as rollout:
        assert sorted(asyncio.run(program())) == [0, 1]
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):  # it comes once the loop's own threads have ended
            asyncio.run(waits_for_ever())


def test_a_cancelled_wait_async_ends_though_no_thread_is_free() -> None:
    async def program() -> None:
        loop, is_over = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, is_over.wait)
        task = asyncio.ensure_future(rollout.wait_async(1))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        has_ended = task.done()
        is_over.set()
        await asyncio.wait([task, busy])
        assert has_ended and task.cancelled()

    with controller(SimulatedEngine(step_s=0.001)) as rollout:
        rollout.submit(1 << 30)
        asyncio.run(program())


def test_an_error_of_a_wait_that_was_cancelled_is_not_logged_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []

    async def program() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        task = asyncio.ensure_future(rollout.wait_async(1))
        await asyncio.to_thread(has_begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        may_fail.set()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        gc.collect()
        await asyncio.sleep(0)

    def fails(*_: Any) -> None:
        has_begun.set()
        may_fail.wait()
        raise RolloutError("planted")

    has_begun, may_fail = threading.Event(), threading.Event()
    with controller() as rollout:
        monkeypatch.setattr(rollout._waiting, "until", fails)
        asyncio.run(program())
    assert not lost


def test_a_wait_async_that_is_cancelled_again_ends_after_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread takes the trainer's devices back: the trainer may not go on before."""

    async def program() -> None:
        task = asyncio.ensure_future(rollout.wait_async(1))
        await asyncio.to_thread(has_begun.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        has_ended_early = task.done()
        is_taken_back.set()
        await asyncio.wait([task])
        assert not has_ended_early and task.cancelled()

    def takes_back(*_: Any) -> bool:
        has_begun.set()
        return is_taken_back.wait()

    has_begun, is_taken_back = threading.Event(), threading.Event()
    with controller() as rollout:
        monkeypatch.setattr(rollout._waiting, "until", takes_back)
        asyncio.run(program())


@pytest.mark.parametrize("is_saved_by_the_loader", [False, True])
def test_each_item_is_given_once_over_kills_and_resumes(is_saved_by_the_loader: bool) -> None:
    """A kill leaves the state of the last save; what is done after it is lost, as the trainer's later steps are."""

    class Loader(list[int]):
        """A StatefulDataLoader in small."""

        def __iter__(self) -> Iterator[int]:
            while self.at < len(self):
                self.at += 1
                yield self[self.at - 1]
            self.at = 0

        at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    draw, given, state = random.Random(5), [], None
    trainer = SimulatedTrainer()
    while len(given) < 120:
        items: Any = (Loader if is_saved_by_the_loader else list)(range(1000))
        with controller(max_staleness=2) as rollout:
            if state is not None:
                rollout.load_state_dict(json.loads(state))
                assert rollout.version == len(given) // 4
                with pytest.raises(StateError, match="the engines serve version 0 and the controller is at"):
                    rollout.wait()
                rollout.update_weights(trainer, version=rollout.version)
            for _ in range(draw.randrange(1, 8)):
                given += rollout.prepare_batch(items, timeout_s=60)["rewards"].tolist()
                rollout.update_weights(trainer)
            state = json.dumps(rollout.state_dict())
            after = rollout.stats.given
            rollout.prepare_batch(items, timeout_s=60)  # of steps after the last checkpoint, which the kill undoes
        assert after == len(given)
    saved = json.loads(state)
    under_way = [data for _, data, *_ in saved["queued"] + saved["ready"]]
    assert sorted(given + under_way) == list(range(len(given) + len(under_way)))


def test_the_requests_of_a_dead_or_silent_engine_go_elsewhere_and_it_comes_back_with_the_present_weights() -> None:
    engines, trainer = [SimulatedEngine(step_s=0.001) for _ in range(3)], SimulatedTrainer()
    silence = threading.Event()
    with controller(engines, max_staleness=1, batch_size=6, unhealthy_after_s=1.0) as rollout:
        never_held_up(rollout, 2)
        for _ in range(12):
            rollout.submit(150)
        until(lambda: all(engine.num_under_way for engine in engines))
        engines[0].is_broken = True
        collect = engines[1].collect
        engines[1].collect = lambda timeout_s=None: silence.wait() and {}  # type: ignore[assignment,method-assign]
        first = rollout.wait(timeout_s=60)
        until(lambda: rollout.stats.engine_failures == 2)
        assert rollout.stats.requests_moved >= 6 and len(first) == 6
        engines[1].collect = collect  # type: ignore[method-assign]
        silence.set()
        rollout.update_weights(trainer)
        assert trainer.synced == [3] and [engine.num_restarts for engine in engines] == [1, 1, 0]
        assert [engine.version for engine in engines] == [1, 1, 1]
        numbers = [one.number for one in first + rollout.wait(timeout_s=60)]
        assert sorted(numbers) == list(range(12))
        for _ in range(6):
            rollout.submit(150)
        until(lambda: all(engine.num_under_way for engine in engines))


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_an_engine_that_dies_while_it_has_nothing_to_do_comes_back_at_the_next_update(
    others: int, is_silent: bool
) -> None:
    """Nobody has seen it before the update pauses it; one that is stopped never answers that call."""
    engines, trainer, ended = [SimulatedEngine() for _ in range(1 + others)], SimulatedTrainer(), threading.Event()
    idle = engines[0]

    def pause(mode: str = "abort") -> None:
        assert ended.wait(60)
        raise StateError("the worker was ended")

    def restart() -> None:
        SimulatedEngine.restart(idle)
        idle.pause = functools.partial(SimulatedEngine.pause, idle)  # type: ignore[method-assign]
        ended.set()

    with controller(engines, max_staleness=0, unhealthy_after_s=0.3) as rollout:
        never_held_up(rollout, 1)
        rollout.prepare_batch([1] * 4, timeout_s=60)
        until(lambda: not any(driver.requests_under_way for driver in rollout._fleet._drivers))
        if is_silent:
            idle.pause, idle.restart = pause, restart  # type: ignore[method-assign]
        else:
            idle.is_broken = True
        asked = idle._next_number
        rollout.update_weights(trainer)
        assert trainer.synced == [1 + others] and {engine.version for engine in engines} == {1}
        assert [engine.num_restarts for engine in engines] == [1] + [0] * others
        rollout.rollout_batch([1] * 8)
        assert rollout.stats.engine_failures == 1 and idle._next_number > asked


def test_an_update_that_finds_an_engine_dead_waits_until_that_is_noted() -> None:
    engines, trainer = [SimulatedEngine(), SimulatedEngine()], SimulatedTrainer()
    with controller(engines) as rollout:
        driver = rollout._fleet._drivers[0]
        tell = driver._on_failure

        def slowly(*given: Any) -> None:
            time.sleep(0.05)
            tell(*given)

        driver._on_failure = slowly
        engines[0].is_broken = True
        rollout.update_weights(trainer)  # type: ignore[arg-type]
        assert trainer.synced == [2] and rollout.stats.engine_failures == 1 and rollout.num_healthy == 2


def test_several_engines_that_are_asked_to_pause_are_waited_for_together() -> None:
    """Engines that have stopped are out after the time of one."""
    engines, trainer = [SimulatedEngine() for _ in range(3)], SimulatedTrainer()
    asked = threading.Barrier(len(engines), timeout=20)  # each pause waits until all have been asked

    def pause(engine: SimulatedEngine, mode: str = "abort") -> None:
        asked.wait()
        SimulatedEngine.pause(engine, mode)

    for engine in engines:
        engine.pause = functools.partial(pause, engine)  # type: ignore[method-assign]
    with controller(engines) as rollout:
        rollout.update_weights(trainer)
        assert trainer.synced == [3] and not asked.broken and rollout.stats.engine_failures == 0


class Struck(SimulatedTrainer):
    """Each of its first syncs kills so many engines."""

    def __init__(self, *deaths: int) -> None:
        super().__init__()
        self._deaths = list(deaths)

    def sync_weights(self, engines: Sequence[SimulatedEngine], *, version: int) -> str:
        for engine in engines[: self._deaths.pop(0)] if self._deaths else []:
            engine.is_broken = True
        if any(engine.is_broken for engine in engines):
            self.synced.append(-len(engines))
            raise SyncError("planted: a worker died")
        return super().sync_weights(engines, version=version)


@pytest.mark.parametrize(
    ("deaths", "synced", "restarts"),
    [([1], [-2, 1], [0, 0]), ([2], [-2, 2], [1, 1]), ([0, 1, 0, 2], [2, -2, 1, -2, 2], [2, 1])],
    ids=["one", "all", "one that comes back, and all"],
)
def test_engines_that_die_inside_a_sync_are_restarted_where_none_is_left(
    deaths: list[int], synced: list[int], restarts: list[int]
) -> None:
    engines, trainer = [SimulatedEngine() for _ in range(2)], Struck(*deaths)
    with controller(engines) as rollout:
        for _ in range(len([one for one in synced if one > 0])):
            rollout.update_weights(trainer)
        assert trainer.synced == synced and [engine.num_restarts for engine in engines] == restarts
        assert rollout.rollout_batch([1, 2])["versions"].max() == rollout.version


def test_an_engine_that_does_not_start_is_restarted_once_in_an_update() -> None:
    dead, other = SimulatedEngine(), SimulatedEngine()
    restarts: list[str] = []

    def restart() -> None:
        restarts.append("dead")
        raise StateError("planted: it does not start")

    dead.is_broken, dead.restart = True, restart  # type: ignore[method-assign]
    trainer = Struck(1)
    with controller([dead, other]) as rollout:
        rollout.update_weights(trainer)
        assert trainer.synced == [-1, 1] and restarts == ["dead"] and other.num_restarts == 1
        assert rollout.num_healthy == 1


def test_engines_that_are_out_are_restarted_at_once_and_those_that_do_not_start_say_so() -> None:
    """A large engine takes minutes to start, and the trainer waits."""
    engines = [SimulatedEngine() for _ in range(3)]
    begun = threading.Barrier(len(engines), timeout=20)  # each restart waits until all have begun

    def restart(engine: SimulatedEngine) -> None:
        begun.wait()
        if engine is engines[1]:
            raise StateError("planted: it does not start")
        SimulatedEngine.restart(engine)

    trainer = SimulatedTrainer()
    with controller(engines) as rollout:
        for driver, engine in zip(rollout._fleet._drivers, engines, strict=True):
            driver.end(StateError("planted: it died"))
            engine.restart = functools.partial(restart, engine)  # type: ignore[method-assign]
        rollout.update_weights(trainer)
        assert trainer.synced == [2] and rollout.num_healthy == 2
        assert str(rollout._fleet.failures[1]) == "planted: it does not start"


def test_engines_of_one_device_are_restarted_one_after_the_other() -> None:
    engines = [SimulatedEngine() for _ in range(3)]
    under_way: list[int] = []
    most: list[int] = []

    def restart(engine: SimulatedEngine) -> None:
        under_way.append(0)
        most.append(len(under_way))
        time.sleep(0.02)
        under_way.pop()
        SimulatedEngine.restart(engine)

    with controller(engines) as rollout:
        for driver, engine in zip(rollout._fleet._drivers, engines, strict=True):
            driver.end(StateError("planted: it died"))
            engine.devices = ["cuda:0", "cuda:1"]  # type: ignore[attr-defined]
            engine.restart = functools.partial(restart, engine)  # type: ignore[method-assign]
        rollout.update_weights(SimulatedTrainer())
        assert rollout.num_healthy == 3 and max(most) == 1


def test_ctrl_c_while_engines_are_asked_to_pause_leaves_none_paused() -> None:
    with controller([SimulatedEngine(), SimulatedEngine()]) as rollout:
        driver = rollout._fleet._drivers[1]
        ask = driver.ask_to_pause

        def interrupted(*given: Any) -> None:
            ask(*given)
            raise KeyboardInterrupt

        driver.ask_to_pause = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt), rollout.generation_paused():
            pass
        assert len(rollout.rollout_episodes([1] * 8, timeout_s=5)) == 8


def test_engines_that_die_in_each_sync_end_the_update() -> None:
    trainer = Struck(1, 1)
    with controller() as rollout:
        with pytest.raises(SyncError, match="planted: a worker died"):
            rollout.update_weights(trainer)
        assert trainer.synced == [-1, -1] and rollout.version == 0


def test_a_prompt_that_an_engine_cannot_take_ends_its_episode_alone() -> None:
    """vLLM refuses some images so."""
    engines = [SimulatedEngine(), SimulatedEngine()]

    def submit(engine: SimulatedEngine, prompts: Sequence[Any], *given: Any, **options: Any) -> list[int]:
        if any(prompt[0] == 14 for prompt in prompts):
            raise UnsupportedError("a prompt of 14", "planted")
        return SimulatedEngine.submit(engine, prompts, *given, **options)

    for engine in engines:
        engine.submit = functools.partial(submit, engine)  # type: ignore[method-assign]
    with controller(engines, batch_size=8) as rollout:
        for steps in (1, 2, 13, 3, 4):
            rollout.submit(steps)
        assert sorted(one.data for one in rollout.wait(4, timeout_s=60)) == [1, 2, 3, 4]
        until(lambda: rollout.stats.failed)
        assert (rollout.stats.failed, rollout.stats.engine_failures) == (1, 0)


def test_the_watch_goes_on_after_an_error_of_its_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_LOOK_S", 0.01)
    with controller() as rollout:
        driver = rollout._fleet._drivers[0]
        found = iter([RuntimeError("planted")])

        def stuck_s() -> float:
            for error in found:
                raise error
            return 100.0

        driver.stuck_s = stuck_s  # type: ignore[method-assign]
        until(lambda: rollout.stats.engine_failures)
    assert "sampler 0 could not be looked at; the watch goes on" in caplog.text and "planted" in caplog.text


def test_requests_that_an_engine_never_answers_to_have_got_go_to_another() -> None:
    """A process that is stopped just when it is sent them never answers."""
    engines, silence = [SimulatedEngine(step_s=0.001), SimulatedEngine(step_s=0.001)], threading.Event()
    stopped = threading.Event()

    def submit(*_: Any, **__: Any) -> list[int]:
        stopped.set()
        silence.wait()
        return [1]

    engines[0].submit = submit  # type: ignore[method-assign]
    with controller(engines, batch_size=4, unhealthy_after_s=0.05) as rollout:
        never_held_up(rollout, 1)
        numbers = [rollout.submit(20) for _ in range(4)]
        assert stopped.wait(30)
        assert sorted(one.number for one in rollout.wait(timeout_s=60)) == numbers
        assert (rollout.stats.engine_failures, rollout.stats.tokens_discarded) == (1, 0)
        silence.set()


def test_without_an_engine_wait_says_so_and_the_next_update_brings_it_back() -> None:
    engine = SimulatedEngine(step_s=0.001)
    with controller(engine, batch_size=2) as rollout:
        rollout.submit(50)
        rollout.submit(50)
        until(lambda: engine.num_under_way)
        engine.is_broken = True
        with pytest.raises(RolloutError, match=r"no inference engine is left: sampler 0: .*the engine is dead; update"):
            rollout.wait()
        rollout.update_weights(SimulatedTrainer())
        assert [one.oldest_version for one in rollout.wait()] == [1, 1] and rollout.stats.engine_failures == 1


def test_episodes_that_a_jump_of_versions_made_too_stale_begin_anew() -> None:
    engine, trainer = SimulatedEngine(step_s=0.001), SimulatedTrainer()
    with controller(engine, batch_size=2, max_staleness=1) as rollout:
        for steps in (1, 1, 300, 300):
            rollout.submit(steps)
        until(lambda: len(rollout._episodes.ready) == 2)
        rollout.update_weights(trainer, version=5)
        assert [one.oldest_version for one in rollout.wait()] == [5, 5]
        assert rollout.stats.too_stale == 4 and rollout.stats.tokens_discarded >= 2


class Tidies(Workflow):
    """As ``Steps``; once it is cancelled it tidies up, which fails or rejects the episode, as it says."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory] | None:
        try:
            await client.generate([data, 1])
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)
            if self._fails:
                raise ConnectionError("planted") from None
            return None
        return client.trajectories()


@pytest.mark.parametrize("fails", [True, False])
def test_an_episode_that_begins_anew_is_not_lost_by_what_its_workflow_does_when_it_is_cancelled(fails: bool) -> None:
    engine = SimulatedEngine(step_s=0.001)
    with controller(engine, Tidies(fails), batch_size=2, max_staleness=0) as rollout:
        numbers = [rollout.submit(100), rollout.submit(100)]
        until(lambda: engine.num_under_way == 2)
        rollout.update_weights(SimulatedTrainer())
        assert sorted(one.number for one in rollout.wait(2)) == numbers
        stats = rollout.stats
        assert (stats.given, stats.too_stale, stats.failed, stats.rejected) == (2, 2, 0, 0)


def test_direct_episodes_that_were_cancelled_are_no_failures_in_a_row() -> None:
    engine = SimulatedEngine(step_s=0.001)
    with controller(engine, Tidies(fails=True), batch_size=1, max_failures_in_row=2) as rollout:
        with pytest.raises(RolloutTimeoutError):
            rollout.evaluate([10**9] * 2, timeout_s=0.05)
        until(lambda: not engine.num_under_way)
        time.sleep(0.05)  # they tidy up
        rollout.submit(1)
        assert len(rollout.wait(1)) == 1 and rollout.stats.failed == 0


def test_who_waits_in_another_thread_while_the_weights_change_waits_for_them() -> None:
    engines = [SimulatedEngine(step_s=0.001), SimulatedEngine(step_s=0.001)]

    class OneByOne(SimulatedTrainer):
        def sync_weights(self, engines: Sequence[SimulatedEngine], *, version: int) -> str:
            engines[0].version = version
            others.append(threads.submit(rollout.evaluate, [1]))
            rollout._wake()
            time.sleep(0.05)  # both have looked
            assert not any(one.done() for one in others)
            return super().sync_weights(engines, version=version)

    with controller(engines, batch_size=2, max_staleness=2) as rollout, ThreadPoolExecutor() as threads:
        for _ in range(2):
            rollout.submit(100)
        others = [threads.submit(rollout.wait, 2)]
        until(lambda: all(engine.num_under_way for engine in engines))
        rollout.update_weights(OneByOne())
        assert [len(one.result(60)) for one in others] == [2, 1]


def test_after_a_change_of_weights_that_failed_a_wait_says_so() -> None:
    class Fails(SimulatedTrainer):
        def sync_weights(self, engines: Sequence[SimulatedEngine], *, version: int) -> str:
            engines[0].version = version
            raise ValueError("planted")

    engine = SimulatedEngine(step_s=0.001)
    with controller(engine, batch_size=1) as rollout, ThreadPoolExecutor() as threads:
        rollout.submit(10**9)
        other = threads.submit(rollout.wait, 1)
        until(lambda: engine.num_under_way)
        with pytest.raises(ValueError, match="planted"):
            rollout.update_weights(Fails())
        told = "is refused: the engines serve version 1 and the controller is at 0; call update_weights"
        with pytest.raises(StateError, match=re.escape(f"wait() {told}")):
            other.result(60)
        with pytest.raises(StateError, match=re.escape(f"evaluate() {told}")):
            rollout.evaluate([1])


def test_a_state_that_is_asked_for_while_a_dataloader_continues_has_its_place() -> None:
    class Slow(list[int]):
        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                asked.set()
                time.sleep(0.005)
                yield item

    with controller() as rollout:
        rollout.prepare_batch(list(range(20)), timeout_s=60)
        saved = rollout.state_dict()
    asked = threading.Event()
    with controller() as rollout, ThreadPoolExecutor() as threads:
        rollout.load_state_dict(saved)
        preparing = threads.submit(rollout.prepare_batch, Slow(range(20)))
        assert asked.wait(60)
        assert rollout.state_dict()["source"]["num_taken"] >= saved["source"]["num_taken"] > 0
        preparing.result(60)


def test_episodes_are_submitted_while_a_state_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a large batch take seconds to copy, in which no episode could begin or end."""
    plain = Trajectory.plain
    with controller(batch_size=1, max_staleness=0) as rollout, ThreadPoolExecutor() as threads:

        def slow(trajectory: Trajectory) -> dict[str, Any]:
            threads.submit(rollout.submit, 2).result(timeout=5)
            return plain(trajectory)

        monkeypatch.setattr(Trajectory, "plain", slow)
        rollout.submit(1)
        until(lambda: rollout.stats.ended)
        state = rollout.state_dict()
        assert [data for _, data, _ in state["ready"]] == [1] and state["queued"] == []
        assert [data for _, data in rollout.state_dict()["queued"]] == [2]


@pytest.mark.parametrize(
    "beside", [{"routed_experts": torch.ones(2, 1, 2, dtype=torch.int16)}, {"inputs": {"pixels": torch.ones(1)}}]
)
def test_a_finished_episode_that_is_no_plain_data_begins_anew_after_a_resume(beside: dict[str, Any]) -> None:
    """Without the sampler's experts a batch would be trained on with others, and nobody would be told."""
    saved = EpisodeQueue(StalenessBound(max_staleness=0, batch_size=2))
    for data, extra in (("one", beside), ("two", {})):
        saved.add(data)
        number, _ = saved.begin()
        trajectory = Trajectory([1, 2], [False, True], [0.0, -1.0], [-1, 0], **extra)
        saved.end(EpisodeEnd(Episode(number, data, [trajectory]), "ended", 1), is_direct=False)
    queue = EpisodeQueue(StalenessBound(max_staleness=0, batch_size=2))
    queue.load_state_dict(json.loads(json.dumps(saved.snapshot().plain())))
    assert [one.data for one in queue.ready.values()] == ["two"] and list(queue.queued) == [(0, "one")]


def test_two_updates_at_once_bring_an_engine_back_once() -> None:
    class Slow(SimulatedTrainer):
        def sync_weights(self, engines: Sequence[SimulatedEngine], *, version: int) -> str:
            time.sleep(0.03)
            return super().sync_weights(engines, version=version)

    engines, trainer = [SimulatedEngine(), SimulatedEngine()], Slow()
    with controller(engines) as rollout, ThreadPoolExecutor() as threads:
        engines[0].is_broken = True
        for one in [threads.submit(rollout.update_weights, trainer) for _ in range(2)]:  # type: ignore[arg-type]
            one.result(60)
        assert engines[0].num_restarts == 1 and trainer.synced == [2, 2] and rollout.num_healthy == 2


def test_a_request_that_is_cancelled_waits_for_no_room_any_more() -> None:
    with controller(max_in_flight=1) as rollout:
        asked = [rollout._fleet.submit([10**9, 1], SamplingParams(), lambda found: None) for _ in range(3)]
        assert list(rollout._fleet._waiting) == asked[1:]
        rollout._fleet.cancel(asked[2])
        assert list(rollout._fleet._waiting) == asked[1:2]


def test_a_version_that_is_refused_changes_no_pace() -> None:
    engine = SimulatedEngine()
    with controller(engine, max_staleness=2) as rollout:
        assert rollout._pacing is not None
        rollout._pacing.note_wait(4)
        engine.version = 1
        with pytest.raises(InvalidInputError, match="takes a whole number of at least 0, the version of now, got True"):
            rollout.set_version(True)
        assert rollout._pacing._slack == -4 and rollout.version == 0
        rollout.set_version(1)
        assert rollout._pacing._slack is None


def test_finished_episodes_that_a_smaller_bound_does_not_let_in_begin_anew_after_a_resume() -> None:
    saved = EpisodeQueue(StalenessBound(max_staleness=2, batch_size=1))
    for version in range(3):
        saved.set_version(version)
        saved.add(f"of {version}")
        number, data = saved.begin()
        episode = Episode(number, data, [Trajectory([1, 2], [False, True], [0.0, -1.0], [-1, version])])
        saved.end(EpisodeEnd(episode, "ended", 1), is_direct=False)
    queue = EpisodeQueue(StalenessBound(max_staleness=1, batch_size=1))
    queue.load_state_dict(saved.snapshot().plain())
    assert [one.data for one in queue.ready.values()] == ["of 1", "of 2"] and list(queue.queued) == [(0, "of 0")]
    assert queue.bound.ready == {1: 1, 2: 2} and queue.counts["too_stale"] == 1


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_steps() -> None:
    """Objects are counted: bytes of the process depend on the allocator."""
    trainer, items = SimulatedTrainer(), list(range(1, 9))
    counts = []
    with controller(max_staleness=2) as rollout:
        for step in range(1200):
            rollout.prepare_batch(items, timeout_s=60)
            rollout.update_weights(trainer)
            if step in (200, 700, 1199):
                gc.collect()
                counts.append(len(gc.get_objects()) - len(rollout.timeline._spans))
        assert len(rollout.timeline.spans) <= 10_000
    early, middle, late = counts
    assert late - middle < 500 and middle - early < 500, counts
