"""The thread that owns an engine: what it sends, how long a pause waits for it, and when the engine counts as stuck."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.launchers.pending_calls import PendingCall, PendingCalls
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError
from rlcore.rollout import engine_driver
from rlcore.rollout.engine_driver import EngineDriver, Request, paused
from rlcore.rollout.timeline import Timeline
from tests.rollout.simulated_engine import SimulatedEngine

ENDLESS = 1 << 30


class Counting(SimulatedEngine):
    """Notes the size of each submission, and calls ``at_call`` in each call; it refuses empty prompts."""

    def __init__(self) -> None:
        super().__init__(step_s=0.001)
        self.sizes: list[int] = []
        self.at_call: Callable[[], object] = lambda: None

    def submit(self, prompts: Sequence[Any], *given: Any, **options: Any) -> list[int]:
        self.sizes.append(len(prompts))
        self.at_call()
        return super().submit(prompts, *given, **options)

    def collect(self, timeout_s: float | None = None) -> Any:
        self.at_call()
        return super().collect(timeout_s)


@contextmanager
def driver_of(engine: SimulatedEngine) -> Iterator[EngineDriver]:
    driver = EngineDriver(engine, "sampler 0", Timeline(), lambda *_: None, lambda: None)  # type: ignore[arg-type]
    try:
        yield driver
    finally:
        driver.close(5)


def submit_together(driver: EngineDriver, prompts: Sequence[list[int]]) -> tuple[list[Any], threading.Event]:
    """Return what is delivered of one submission, and the end of the first delivery."""
    found: list[Any] = []
    told = threading.Event()

    def deliver(what: Any) -> None:
        found.append(what)
        told.set()

    with paused([driver]):
        for prompt in prompts:
            driver.submit(Request(prompt, SamplingParams(max_tokens=8), deliver))
    return found, told


@pytest.mark.parametrize("bad", [0, 20, 31])
def test_one_prompt_of_32_that_is_refused_is_found_by_halves(bad: int) -> None:
    engine = Counting()
    with driver_of(engine) as driver:
        found, told = submit_together(driver, [[] if index == bad else [ENDLESS] for index in range(32)])
        assert told.wait(30)
        with paused([driver]):
            assert engine.num_under_way == driver.requests_under_way == 31
        assert len(found) == 1 and isinstance(found[0], InvalidInputError)
        assert len(engine.sizes) == 1 + 2 * 5, "two submissions for each time that 32 can be halved"


def test_a_pause_waits_for_one_submission_of_those_that_are_refused() -> None:
    engine, holder = Counting(), object()
    with driver_of(engine) as driver:
        engine.at_call = lambda: driver.ask_to_pause(holder)
        found, _ = submit_together(driver, [[]] * 32)
        driver.await_pause()
        assert engine.sizes == [32] and found == [] and driver.requests_under_way == 32
        engine.at_call = lambda: None
        driver.ask_to_resume(holder)
        while driver.requests_under_way:
            time.sleep(0.001)
        assert len(found) == 32 and driver.tokens_under_way == 0


def test_each_call_of_an_engine_has_a_time_of_its_own_to_answer() -> None:
    """Many calls in a row, each of which is answered, are no silence."""
    engine, began = Counting(), []
    with driver_of(engine) as driver:
        engine.at_call = lambda: began.append(driver._call_began)
        _, told = submit_together(driver, [[1], [], [1]])
        assert told.wait(30)
    assert len(began) > len(engine.sizes) == 5 and len(set(began)) == len(began)


def test_a_collect_right_after_a_delivery_is_short_for_a_next_turn_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they become longer, up to the longest: each costs a call of the workers."""
    engine, now = Counting(), 100.0
    waits: list[float | None] = []
    collect = engine.collect

    def watched(timeout_s: float) -> Any:
        nonlocal now
        now += timeout_s
        waits.append(timeout_s)
        if found := collect(timeout_s):
            waits.append(None)
        return found

    engine.collect = watched  # type: ignore[assignment,method-assign]
    monkeypatch.setattr(engine_driver, "time", SimpleNamespace(monotonic=lambda: now))
    with driver_of(engine) as driver:
        submit_together(driver, [[ENDLESS], [3]])
        while None not in waits or len(waits) < waits.index(None) + 8:
            time.sleep(0.001)
        at = waits.index(None)
        assert waits[:at] == [0.02] * 3
        assert waits[at + 1 : at + 8] == pytest.approx([0.002, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02])


@pytest.mark.parametrize(("busy_for", "least_s", "most_s"), [("the train engine", 0, 50), ("the sampler", 100, 150)])
def test_time_in_which_a_shared_process_is_busy_for_the_trainer_is_no_silence(
    busy_for: str, least_s: float, most_s: float
) -> None:
    engine, calls = SimulatedEngine(), PendingCalls()
    worker = _Worker(calls)
    engine.executors = [SimpleNamespace(engine="the sampler", workers=[worker])]  # type: ignore[attr-defined]
    number = calls.add(PendingCall(WorkerContext(busy_for, 0, 1, "cpu:0", 0), "train_batch", 600.0))
    calls.add(PendingCall(WorkerContext("the sampler", 0, 1, "cpu:0", 1), "collect", 600.0))
    assert number is not None
    with driver_of(engine) as driver:
        driver._call_began = time.monotonic() - 100
        assert least_s <= driver.stuck_s() < most_s
        calls.fail(number, ValueError("planted"))  # the trainer's call has ended, and the sampler's begins
        assert least_s <= driver.stuck_s() < most_s
        driver._call_began = None


class _Worker:
    """A worker of another process."""

    process_id = os.getpid() + 1

    def __init__(self, calls: PendingCalls) -> None:
        self._calls = calls

    @property
    def current(self) -> Any:
        return self._calls.current
