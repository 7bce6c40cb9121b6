"""``EngineDriver``: the thread that owns one inference engine, which has no lock of its own.

It submits what the event loop asks for, collects what has ended, and stands still while somebody else needs the engine
for a weight update. Requests that are under way then stay, and go on with the next weights.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt
from rlcore.errors import InvalidInputError, RlcoreError, StateError, UnsupportedError, first_line
from rlcore.rollout.timeline import Timeline

if TYPE_CHECKING:
    from rlcore.engines.inference import InferenceEngine

_log = logging.getLogger(__name__)
_COLLECT_S = 0.02
"""How long one call of ``collect`` waits at most: as long may a weight update have to wait for the driver."""
_NEXT_TURN_S = 0.002
"""How long it waits at least, right after a delivery: whoever was given a completion may soon send the next turn."""
_SENT_SAMPLES = 32
"""How many samples are sent together: an engine takes a millisecond for each, and makes no step meanwhile."""
_MANY = 1 << 30


@dataclass(eq=False)
class Request:
    """One prompt that waits for its completions."""

    prompt: Prompt
    params: SamplingParams
    deliver: Callable[[RequestOutput | RlcoreError], None]
    is_cancelled: bool = False
    tokens: int = field(init=False)
    """The most that it may cost."""

    def __post_init__(self) -> None:
        length = len(self.prompt) // 4 if isinstance(self.prompt, str) else len(self.prompt)
        self.tokens = length + self.params.n * self.params.max_tokens


class EngineDriver:
    """Runs one engine in a thread of its own.

    Args:
        name: of the engine in the timeline and in messages.
        on_failure: called, once, in the driver's thread, with the error that ended it and the requests that it had.
        on_room: called in the driver's thread when it may have room for another request.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        name: str,
        timeline: Timeline,
        on_failure: Callable[[EngineDriver, RlcoreError, list[Request]], None],
        on_room: Callable[[], None],
    ) -> None:
        self.engine, self.name = engine, name
        self._timeline, self._on_failure, self._on_room = timeline, on_failure, on_room
        self._changed = threading.Condition()
        self._new: list[Request] = []
        self._sending: list[Request] = []
        """The requests that the engine is being sent: it may never answer that call."""
        self._under_way: dict[int, Request] = {}
        self.tokens_under_way = 0
        """The most that all three may cost, counted as they come and go: summing at each request would take time
        that grows with their square."""
        self._holders: set[object] = set()
        """The ``paused`` blocks for which the engine stands still."""
        self._stands_still = False
        self._is_ended = False
        self._is_out = False
        """It has ended, and ``on_failure`` has been told."""
        self._call_began: float | None = None
        """When the last call of the step that is under way began."""
        self._last_delivery = 0.0
        self._last_elsewhere = 0.0
        """When ``stuck_s`` last found a worker's process busy for another engine."""
        self._thread = threading.Thread(target=self._run, name=f"rlcore-{name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------ called from any thread

    def submit(self, request: Request) -> None:
        with self._changed:
            if not self._is_ended:
                self._new.append(request)
                self.tokens_under_way += request.tokens
                self._changed.notify_all()
                return
        self._on_failure(self, StateError(f"{self.name} has ended"), [request])

    def cancel(self, request: Request) -> None:
        """Have the engine abort the request, when the driver comes to it; nothing is delivered."""
        with self._changed:
            request.is_cancelled = True
            self._changed.notify_all()

    @property
    def requests_under_way(self) -> int:
        with self._changed:
            return len(self._new) + len(self._sending) + len(self._under_way)

    @property
    def is_alive(self) -> bool:
        return not self._is_ended

    @property
    def is_held(self) -> bool:
        """Somebody needs the engine to stand still."""
        return bool(self._holders)

    def stuck_s(self) -> float:
        """Return for how long the engine has not answered; 0 for one whose worker is this process.

        Time in which a worker's process was busy for another engine, such as the trainer, does not count. It is noted
        at each look: later the process may have answered that call, and this engine not yet.
        """
        began = self._call_began
        if began is None or _is_inline(self.engine):
            return 0.0
        if _is_busy_elsewhere(self.engine):
            self._last_elsewhere = time.monotonic()
        return time.monotonic() - max(began, self._last_elsewhere)

    def ask_to_pause(self, holder: object) -> None:
        """Have the driver's thread pause the engine: the caller need not wait for one that has stopped.

        Args:
            holder: for whom it stands still, until ``ask_to_resume`` with the same.
        """
        with self._changed:
            self._holders.add(holder)
            self._changed.notify_all()

    def await_pause(self) -> None:
        """Wait until the engine makes no tokens, or is out."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_out or (self._stands_still and self._call_began is None))

    def ask_to_resume(self, holder: object) -> None:
        """Have the driver's thread let the engine go on, once nobody holds it; for who does not hold it do nothing."""
        with self._changed:
            self._holders.discard(holder)
            self._changed.notify_all()

    def await_resume(self) -> None:
        """Wait until the engine goes on, is out, or is to pause for somebody else."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_out or self._holders or not self._stands_still)

    def end(self, error: RlcoreError) -> None:
        """Take the engine out: its requests go to ``on_failure``, and what it still answers is dropped."""
        with self._changed:
            if self._is_ended:
                return
            self._is_ended = True
            held = (*self._under_way.values(), *self._sending, *self._new)
            lost = [request for request in held if not request.is_cancelled]
            self._under_way, self._sending, self._new, self.tokens_under_way = {}, [], [], 0
            self._changed.notify_all()
        try:
            self._timeline.end(self.name)
            _log.warning("%s is taken out: %s; its %d requests go elsewhere", self.name, first_line(error), len(lost))
            self._on_failure(self, error, lost)
        finally:
            with self._changed:
                self._is_out = True
                self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """End the thread and abort what the engine has under way; one that stands still goes on for its next user."""
        with self._changed:
            self._is_ended = self._is_out = True
            self._new, self._sending = [], []
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._timeline.end(self.name)
        if not self._thread.is_alive():
            with contextlib.suppress(RlcoreError):  # its workers may have ended
                self.engine.abort()
                if self._stands_still:
                    self.engine.resume()
        self._under_way = {}

    # --------------------------------------------------------------------------------- the driver's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if self._stands_still != bool(self._holders):
                    self._pause_or_resume()
                elif not self._stands_still:
                    self._step(*self._taken())
                self._call_ended()
                self._on_room()
        except RlcoreError as error:
            self._fail(error)
        except Exception as error:
            self._fail(StateError(f"{self.name} failed: {type(error).__name__}: {error}"))

    def _fail(self, error: RlcoreError) -> None:
        self._call_ended()
        self.end(error)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; return False at the end."""
        with self._changed:
            while not self._is_ended:
                if self._stands_still != bool(self._holders):
                    self._call_began = time.monotonic()
                    return True
                if not self._holders and (self._new or self._under_way):
                    self._call_began = time.monotonic()
                    self._timeline.begin(self.name, "generate")
                    return True
                if not self._holders:
                    self._timeline.end(self.name)
                self._changed.wait()
        return False

    def _pause_or_resume(self) -> None:
        if not self._stands_still:
            self._timeline.end(self.name)
            self.engine.pause("keep")
        elif getattr(self.engine, "sync_state", None) != "poisoned":
            self.engine.resume()
        with self._changed:
            self._stands_still = not self._stands_still

    def _call_ended(self) -> None:
        with self._changed:
            self._call_began = None
            self._changed.notify_all()

    def _taken(self) -> tuple[list[Request], list[int]]:
        with self._changed:
            wanted = [one for one in self._new if not one.is_cancelled]
            cancelled = [number for number, one in self._under_way.items() if one.is_cancelled]
            self._leave([one for one in self._new if one.is_cancelled])
            self._leave([self._under_way.pop(number) for number in cancelled])
            count = _num_sent_together(wanted)
            self._sending, self._new = wanted[:count], wanted[count:]
            return self._sending, cancelled

    def _step(self, new: list[Request], cancelled: list[int]) -> None:
        if cancelled:
            self.engine.abort(cancelled)
        self._send(new)
        if not self._under_way:
            return
        self._call_began = time.monotonic()
        for number, output in self.engine.collect(timeout_s=self._patience_s()).items():
            with self._changed:
                request = self._under_way.pop(number, None)
                self._leave([request] if request else [])
            if request is not None and not request.is_cancelled:
                request.deliver(output)
                self._last_delivery = time.monotonic()

    def _patience_s(self) -> float:
        """Return how long a ``collect`` waits: as long as nothing was delivered, for a request waits for it."""
        if self._new:
            return 0.0
        return min(_COLLECT_S, max(_NEXT_TURN_S, time.monotonic() - self._last_delivery))

    def _send(self, new: list[Request]) -> None:
        """Submit requests together; where the engine refuses one, submit halves, so that only that one fails."""
        if not new:
            return
        if self._holders:  # what is refused in many parts would keep a weight update waiting
            self._put_back(new)
            return
        self._call_began = time.monotonic()
        try:
            numbers = self.engine.submit([one.prompt for one in new], [one.params for one in new], max_in_flight=_MANY)
        except (InvalidInputError, UnsupportedError) as error:
            if len(new) > 1:
                half = len(new) // 2
                self._send(new[:half])
                self._send(new[half:])
            elif self._have_been_sent(new):
                new[0].deliver(error)
        else:
            self._have_been_sent(new, numbers)

    def _put_back(self, requests: list[Request]) -> None:
        """Send them after the pause, unless they went to ``on_failure`` before."""
        kept = set(requests)
        with self._changed:
            if not self._is_ended:
                self._sending = [one for one in self._sending if one not in kept]
                self._new += requests

    def _have_been_sent(self, requests: list[Request], numbers: Sequence[int] = ()) -> bool:
        """Note that the engine has them, under these numbers; return False if they went to ``on_failure`` before."""
        sent = set(requests)
        with self._changed:
            if self._is_ended:
                return False
            self._sending = [one for one in self._sending if one not in sent]
            if numbers:
                self._under_way |= dict(zip(numbers, requests, strict=True))
            else:
                self._leave(requests)
            return True

    def _leave(self, requests: Sequence[Request]) -> None:
        """Count requests that the engine has no more. It is called with the lock held."""
        self.tokens_under_way -= sum(one.tokens for one in requests)


@contextlib.contextmanager
def paused(drivers: Sequence[EngineDriver]) -> Iterator[None]:
    """Inside, the engines are the caller's, and make no tokens. One that cannot be paused is taken out.

    All are asked before one is waited for, so that several that have stopped are out after the time of one.
    """
    holder = object()
    try:  # Ctrl-C may come while they are asked, too
        for driver in drivers:
            driver.ask_to_pause(holder)
        for driver in drivers:
            driver.await_pause()
        yield
    finally:
        for driver in drivers:
            driver.ask_to_resume(holder)
        for driver in drivers:
            driver.await_resume()


def _num_sent_together(requests: Sequence[Request]) -> int:
    """Return how many of these are sent now; between two parts, others get steps, are cancelled, or pause them."""
    samples = itertools.accumulate(one.params.n for one in requests)
    return max(1, sum(1 for _ in itertools.takewhile(lambda count: count <= _SENT_SAMPLES, samples)))


def _is_inline(engine: InferenceEngine) -> bool:
    groups = getattr(engine, "executors", [])
    return any(worker.process_id == os.getpid() for group in groups for worker in group.workers)


def _is_busy_elsewhere(engine: InferenceEngine) -> bool:
    """Return True if a process of its workers runs a call of another engine, behind which its own wait."""
    groups = getattr(engine, "executors", [])
    calls = [(group.engine, worker.current) for group in groups for worker in group.workers]
    return any(call is not None and call.engine != own for own, call in calls)
