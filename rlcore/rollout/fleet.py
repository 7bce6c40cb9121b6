"""``Fleet``: the inference engines of a controller. What an unhealthy one had to do goes to the others.

An engine is taken out when one of its calls fails, such as after the death of a worker, or when it has not answered for
``unhealthy_after_s``, as a stopped process does. It comes back, restarted and with the trainer's weights, when weights
are updated; until then, with no engine left, requests wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt
from rlcore.errors import RlcoreError, RolloutError, SyncError, first_line
from rlcore.rollout.engine_driver import EngineDriver, Request
from rlcore.rollout.timeline import Timeline

if TYPE_CHECKING:
    from rlcore.engines.inference import InferenceEngine

R = TypeVar("R")
_log = logging.getLogger(__name__)
_CLOSE_S = 5.0


class Fleet:
    """Deals requests out to engines, and keeps those going that can.

    Args:
        on_change: called, in any thread, when an engine was taken out.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        timeline: Timeline,
        *,
        unhealthy_after_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self.engines = list(engines)
        self._timeline, self._unhealthy_after_s, self._on_change = timeline, unhealthy_after_s, on_change
        self._lock = threading.RLock()
        self._waiting: list[Request] = []
        self._drivers = [self._driver(index) for index in range(len(engines))]
        self.failures: dict[int, RlcoreError] = {}
        """Index of each engine that is out -> why."""
        self.num_failures = 0
        self.num_moved = 0
        """Requests that were begun anew on another engine."""

    def lane(self, index: int) -> str:
        return f"sampler {index}"

    @property
    def num_healthy(self) -> int:
        return len(self.engines) - len(self.failures)

    @property
    def served_versions(self) -> set[int]:
        """The versions of the weights that the healthy engines serve."""
        return {engine.version for index, engine in enumerate(self.engines) if index not in self.failures}

    def submit(
        self, prompt: Prompt, params: SamplingParams, deliver: Callable[[RequestOutput | RlcoreError], None]
    ) -> Request:
        request = Request(prompt, params, deliver)
        self._place(request)
        return request

    def cancel(self, request: Request) -> None:
        request.is_cancelled = True
        with self._lock:
            drivers = list(self._drivers)
        for driver in drivers:
            driver.cancel(request)

    @contextlib.contextmanager
    def paused(self) -> Iterator[list[InferenceEngine]]:
        """Inside, no engine makes tokens; the healthy ones are the caller's."""
        with contextlib.ExitStack() as stack:
            drivers = self._healthy()
            for driver in drivers:
                stack.enter_context(driver.paused("keep"))
            yield [driver.engine for driver in drivers if driver.is_alive]

    def update(self, sync: Callable[[list[InferenceEngine]], R]) -> R:
        """Give all engines new weights; those that were out are restarted first, and come back.

        Args:
            sync: sends the weights to these engines.

        Raises:
            RolloutError: no engine is left.
            Exception: what ``sync`` raised with engines that all live.
        """
        restarted = self._restarted()
        with self.paused() as healthy:
            engines = healthy + [self.engines[index] for index in restarted]
            if not engines:
                raise RolloutError(f"no inference engine is left: {self._why_out()}") from self._first_failure()
            try:
                found = sync(engines)
            except SyncError:
                lively = [engine for engine in engines if _answers(engine)]
                if not lively or len(lively) == len(engines):
                    raise
                self._take_out_dead(engines)
                restarted = [index for index in restarted if self.engines[index] in lively]
                found = sync(lively)
        self._bring_back(restarted)
        return found

    def check(self) -> None:
        """Take out the engines that have not answered for too long."""
        for driver in self._healthy():
            if (stuck_s := driver.stuck_s()) > self._unhealthy_after_s:
                driver.end(RolloutError(f"{driver.name} has not answered for {stuck_s:.1f} s"))

    def close(self) -> None:
        for driver in self._drivers:
            driver.close(_CLOSE_S)

    # ----------------------------------------------------------------------------------------------------

    def why_none(self) -> RolloutError | None:
        """Return an error that says why no engine is left; None if one is."""
        if self.num_healthy:
            return None
        error = RolloutError(f"no inference engine is left: {self._why_out()}; update_weights() restarts them")
        error.__cause__ = self._first_failure()
        return error

    def _driver(self, index: int) -> EngineDriver:
        return EngineDriver(self.engines[index], self.lane(index), self._timeline, self._failed)

    def _healthy(self) -> list[EngineDriver]:
        with self._lock:
            return [driver for driver in self._drivers if driver.is_alive]

    def _place(self, request: Request) -> None:
        with self._lock:
            healthy = self._healthy()
            if not healthy:
                self._waiting.append(request)
                return
            driver = min(healthy, key=lambda one: one.tokens_under_way)
        driver.submit(request)

    def _failed(self, driver: EngineDriver, error: RlcoreError, lost: list[Request]) -> None:
        with self._lock:
            self.num_moved += len(lost)
            index = next((index for index, one in enumerate(self._drivers) if one is driver), None)
            if index is not None and index not in self.failures:
                self.failures[index] = error
                self.num_failures += 1
                _log.warning(
                    "%s is taken out: %s; its %d requests go elsewhere", driver.name, first_line(error), len(lost)
                )
        for request in lost:
            self._place(request)
        self._on_change()

    def _restarted(self) -> list[int]:
        """Restart the engines that are out; return the indices of those that start."""
        restarted = []
        for index in sorted(self.failures):
            try:
                self.engines[index].restart()
                restarted.append(index)
            except RlcoreError as error:
                self.failures[index] = error
                _log.warning("%s could not be restarted: %s", self.lane(index), first_line(error))
        return restarted

    def _bring_back(self, indices: Sequence[int]) -> None:
        with self._lock:
            for index in indices:
                self._drivers[index] = self._driver(index)
                del self.failures[index]
            waiting, self._waiting = self._waiting, []
        for request in waiting:
            if not request.is_cancelled:
                self._place(request)

    def _take_out_dead(self, engines: Sequence[InferenceEngine]) -> None:
        for driver in self._healthy():
            if driver.engine in engines and not _answers(driver.engine):
                driver.end(RolloutError(f"{driver.name} ended during a weight update"))

    def _why_out(self) -> str:
        return "; ".join(f"{self.lane(index)}: {first_line(error)}" for index, error in sorted(self.failures.items()))

    def _first_failure(self) -> RlcoreError | None:
        return next(iter(self.failures.values()), None)


def _answers(engine: InferenceEngine) -> bool:
    """Return True if the workers of an engine still answer."""
    try:
        engine.memory_report()
    except RlcoreError:
        return False
    return True
