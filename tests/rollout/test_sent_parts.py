"""Many requests that wait together: the engine is sent parts of them, and pauses in between."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from rlcore.conformance.ends import wait_until
from rlcore.engines.sampling.params import SamplingParams
from rlcore.rollout.engine_driver import EngineDriver, Request
from rlcore.rollout.timeline import Timeline
from tests.rollout.simulated_engine import SimulatedEngine


class PausingEngine(SimulatedEngine):
    """Keeps how many samples each call of ``submit`` had; the first makes another thread want a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[int]] = []
        self.driver: Any = None

    def submit(self, prompts: Sequence[Any], sampling_params: Sequence[Any], *, max_in_flight: int) -> list[int]:
        self.sent.append([one.n for one in sampling_params])
        if len(self.sent) == 1:
            self.driver.ask_to_pause("a sync")
        return super().submit(prompts, sampling_params, max_in_flight=max_in_flight)


def test_a_pause_gets_between_the_parts_of_many_requests() -> None:
    engine: Any = PausingEngine()
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    failed: list[object] = []
    driver = engine.driver = EngineDriver(engine, "it", Timeline(), lambda *what: failed.append(what), lambda: None)
    try:
        driver.ask_to_pause("the test")
        driver.await_pause()
        for count in (16, 16, 1, 48, 31, 1, 1):
            driver.submit(Request([1], SamplingParams(n=count), ended.put))
        driver.ask_to_resume("the test")
        driver.await_resume()
        wait_until(lambda: engine.sent, "nothing is sent")
        driver.await_pause()
        assert engine.sent == [[16, 16]]
        driver.ask_to_resume("a sync")
        for _ in range(7):
            ended.get(timeout=30)
        assert engine.sent == [[16, 16], [1], [48], [31, 1], [1]]
        assert (driver.requests_under_way, driver.tokens_under_way, failed) == (0, 0, [])
    finally:
        driver.close(5)
