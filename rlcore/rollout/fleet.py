"""``Fleet``: the inference engines of a controller. What an unhealthy one had to do goes to the others.

An engine is taken out when one of its calls fails, such as after the death of a worker, or when it has not answered for
``unhealthy_after_s``, as a stopped process does. It comes back, restarted and with the trainer's weights, when weights
are updated; until then, with no engine left, requests wait.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt
from rlcore.errors import RlcoreError, RolloutError, first_line
from rlcore.rollout.engine_driver import EngineDriver, Request, paused
from rlcore.rollout.timeline import Timeline

if TYPE_CHECKING:
    from rlcore.engines.inference import InferenceEngine

R = TypeVar("R")
_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_LOOK_S = 0.5
"""How often engines are looked at that may not answer any more."""


class Fleet:
    """Deals requests out to engines, and keeps those going that can.

    Args:
        max_in_flight: the most requests that an engine has at a time; others wait, and go to the first with room.
        on_change: called, in any thread, when an engine was taken out.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        timeline: Timeline,
        *,
        unhealthy_after_s: float,
        max_in_flight: int | None,
        on_change: Callable[[], None],
    ) -> None:
        self.engines = list(engines)
        self._timeline, self._unhealthy_after_s, self._on_change = timeline, unhealthy_after_s, on_change
        self._lock = threading.RLock()
        self._updating = threading.Lock()
        """Held in ``update``: of two at once each would bring the same engines back."""
        self._max_in_flight = math.inf if max_in_flight is None else max_in_flight
        self._waiting: deque[Request] = deque()
        self._guest: EngineDriver | None = None
        """The driver of an engine that comes and goes."""
        self._drivers = [self._driver(index) for index in range(len(engines))]
        self.failures: dict[int, RlcoreError] = {}
        """Index of each engine that is out -> why."""
        self.num_failures = 0
        self.num_moved = 0
        """Requests that were begun anew on another engine."""
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="rlcore-fleet", daemon=True).start()

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
            if request in self._waiting:  # asked first: the error of `remove` has the whole prompt in words
                self._waiting.remove(request)
        for driver in self._all_drivers():
            driver.cancel(request)

    def add_guest(self, engine: InferenceEngine, name: str) -> None:
        """Take in an engine that stands still until ``open_guest``; weight updates leave it out."""
        self._guest = EngineDriver(engine, name, self._timeline, self._failed, self._place_waiting)
        self.hold_guest()

    @property
    def guest_is_alive(self) -> bool:
        """There is a guest, and it has not been taken out."""
        return self._guest is not None and self._guest.is_alive

    def open_guest(self) -> None:
        """Let the guest generate: what waits for room goes to it, and what it had goes on."""
        if self._guest is not None:
            self._guest.ask_to_resume(self)
            self._guest.await_resume()
        self._place_waiting()

    def hold_guest(self) -> None:
        """Let the guest stand still; its requests stay with it. After Ctrl-C call it again.

        Raises:
            RolloutError: it has been taken out.
        """
        if self._guest is not None:
            self._guest.ask_to_pause(self)
            self._guest.await_pause()
            if not self._guest.is_alive:
                raise RolloutError(f"{self._guest.name} has been taken out")

    def end_guest(self, error: RlcoreError) -> None:
        """Take the guest out, if it is not yet: its requests go to the other engines."""
        if self._guest is not None:
            self._guest.end(error)

    @contextlib.contextmanager
    def paused(self) -> Iterator[list[InferenceEngine]]:
        """Inside, no engine makes tokens; the healthy ones are the caller's."""
        drivers = self._healthy()
        with paused(drivers):
            yield [driver.engine for driver in drivers if driver.is_alive]

    def update(self, sync: Callable[[list[InferenceEngine]], R]) -> R:
        """Give all engines new weights; those that are out, or cannot be paused, are restarted first, and come back.

        Where some die meanwhile, the others get the weights. If none is left they are restarted, once.

        Args:
            sync: sends the weights to these engines.

        Raises:
            RolloutError: no engine is left.
            Exception: what ``sync`` raised, unless other engines could be given the weights.
        """
        with self._updating:
            return self._update(sync)

    def close(self) -> None:
        self._is_closed.set()
        with contextlib.ExitStack() as ends:  # each driver ends, whatever the end of another raises
            for driver in self._all_drivers():
                ends.callback(driver.close, _CLOSE_S)

    # ----------------------------------------------------------------------------------------------------

    def _update(self, sync: Callable[[list[InferenceEngine]], R]) -> R:
        out = set(self.failures)
        restarted = self._restarted(out)
        with self.paused() as healthy:
            restarted += self._restarted(set(self.failures) - out)  # those that died while they had nothing to do
            engines = healthy + [self.engines[index] for index in restarted]
            if not engines:
                raise RolloutError(f"no inference engine is left: {self._why_out()}") from self._first_failure()
            try:
                found = sync(engines)
            except RlcoreError:
                engines, restarted = self._after_deaths(engines, restarted)
                if not engines:
                    raise
                found = sync(engines)
        self._bring_back(restarted)
        return found

    def _watch(self) -> None:
        """Take out the engines that have not answered for too long, until ``close``."""
        while not self._is_closed.wait(_LOOK_S):
            for driver in self._all_drivers():
                try:
                    if driver.is_alive and (stuck_s := driver.stuck_s()) > self._unhealthy_after_s:
                        driver.end(RolloutError(f"{driver.name} has not answered for {stuck_s:.1f} s"))
                except Exception:  # without this thread nobody would see that an engine has stopped
                    _log.exception("%s could not be looked at; the watch goes on", driver.name)

    def why_none(self) -> RolloutError | None:
        """Return an error that says why no engine is left; None if one is."""
        if self.num_healthy:
            return None
        error = RolloutError(f"no inference engine is left: {self._why_out()}; update_weights() restarts them")
        error.__cause__ = self._first_failure()
        return error

    def _driver(self, index: int) -> EngineDriver:
        return EngineDriver(self.engines[index], self.lane(index), self._timeline, self._failed, self._place_waiting)

    def _all_drivers(self) -> list[EngineDriver]:
        """Return the drivers of all engines, be they healthy or not, and of the guest."""
        with self._lock:
            return [*self._drivers, *([self._guest] if self._guest else [])]

    def _healthy(self) -> list[EngineDriver]:
        with self._lock:
            return [driver for driver in self._drivers if driver.is_alive]

    def _place(self, request: Request) -> None:
        with self._lock:
            self._waiting.append(request)
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Give the requests that wait to engines with room, each to the one that has least to do."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                guest = [self._guest] if self._guest and self._guest.is_alive and not self._guest.is_held else []
                with_room = [one for one in (*self._healthy(), *guest) if one.requests_under_way < self._max_in_flight]
                if not with_room:
                    return
                request = self._waiting.popleft()
                driver = min(with_room, key=lambda one: one.tokens_under_way)
            if not request.is_cancelled:
                driver.submit(request)

    def _failed(self, driver: EngineDriver, error: RlcoreError, lost: list[Request]) -> None:
        with self._lock:
            self.num_moved += len(lost)
            index = next((index for index, one in enumerate(self._drivers) if one is driver), None)
            if index is not None and index not in self.failures:
                self.failures[index] = error
                self.num_failures += 1
        for request in lost:
            self._place(request)
        self._on_change()

    def _restarted(self, indices: set[int]) -> list[int]:
        """Restart these engines; return the indices of those that start.

        Those of a device begin one after the other: vLLM measures the free memory.
        """
        devices = {index: sorted({*self._devices(index)}) for index in sorted(indices)}
        locks = {name: threading.Lock() for names in devices.values() for name in names}

        def restart(index: int) -> bool:
            with contextlib.ExitStack() as held:
                for name in devices[index]:  # sorted: no two wait for each other
                    held.enter_context(locks[name])
                return self._restart(index)

        with ThreadPoolExecutor(max(1, len(devices))) as threads:
            each = map if len(devices) < 2 else threads.map  # Ctrl-C ends the restart of one alone
            return list(itertools.compress(devices, each(restart, devices)))

    def _devices(self, index: int) -> Sequence[str]:
        try:
            return self.engines[index].devices
        except (RlcoreError, AttributeError):  # it is not built; or is the user's own, and tells none
            return ()

    def _restart(self, index: int) -> bool:
        """Restart an engine; return False if it does not start, and note why."""
        try:
            self.engines[index].restart()
        except RlcoreError as error:
            self.failures[index] = error
            _log.warning("%s could not be restarted: %s", self.lane(index), first_line(error))
            return False
        return True

    def _bring_back(self, indices: Sequence[int]) -> None:
        with self._lock:
            for index in indices:
                self._drivers[index] = self._driver(index)
                del self.failures[index]
        self._place_waiting()

    def _after_deaths(
        self, engines: Sequence[InferenceEngine], restarted: Sequence[int]
    ) -> tuple[list[InferenceEngine], list[int]]:
        """Take out those of ``engines`` that died in a sync; where none lives restart these.

        Returns:
            the engines to sync with again, none if none has died or none starts; and which of them were restarted.
        """
        lively = [engine for engine in engines if _answers(engine)]
        if len(lively) == len(engines):
            return [], []
        self._take_out_dead(engines)
        if lively:
            return lively, [index for index in restarted if self.engines[index] in lively]
        again = self._restarted({index for index in self.failures if self.engines[index] in engines})
        return [self.engines[index] for index in again], again

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
