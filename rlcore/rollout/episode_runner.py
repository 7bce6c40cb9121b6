"""``EpisodeRunner``: runs the episodes of a workflow in an event loop, which has a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt
from rlcore.errors import InvalidInputError, RlcoreError, RolloutError, RolloutTimeoutError, one_line
from rlcore.rollout.client import RolloutClient
from rlcore.rollout.conversation import ConversationReader
from rlcore.rollout.episode import Episode, EpisodeEnd, Outcome
from rlcore.rollout.fleet import Fleet
from rlcore.rollout.trajectory import Trajectory
from rlcore.rollout.workflow import Workflow, as_trajectories

_log = logging.getLogger(__name__)
Accept = Callable[[list[Trajectory]], bool]


class EpisodeRunner:
    """Begins episodes, cancels them, and tells how each ended.

    It keeps no count of them and knows no staleness: that is the caller's.

    Locks: the runner has none, because only the loop's thread touches its tasks. ``start``, ``cancel`` and
    ``call_soon`` may be called in any thread, with the caller's lock held or not. They only queue something for the
    loop, return at once, and take effect in the order of the calls. ``on_end``, and what ``call_soon`` was given, run
    in the loop's thread while the runner holds nothing: they may take the caller's lock. So nobody may wait for the
    loop while holding that lock: ``close`` is called without it, and never in the loop's thread.

    Args:
        fleet: answers the requests of the episodes.
        defaults: sampling parameters where a workflow gives none.
        reader: makes what reads conversations, when the first ``client.chat`` of an episode needs it.
        episode_timeout_s: an episode that takes longer ends as "timed_out".
        on_end: is told, once, how each episode ended that had begun to run.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        defaults: SamplingParams,
        reader: Callable[[], ConversationReader],
        episode_timeout_s: float,
        on_end: Callable[[EpisodeEnd], None],
    ) -> None:
        self._fleet, self._defaults, self._reader = fleet, defaults, reader
        self._episode_timeout_s, self._on_end = episode_timeout_s, on_end
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        """Calls that any thread has left for the loop, in order."""
        self._is_woken = self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rlcore-rollout", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------ called from any thread

    def start(self, number: int, data: Any, workflow: Workflow, accept: Accept | None) -> None:
        """Begin an episode.

        Args:
            accept: says of its trajectories whether the episode is good; None accepts all.
        """
        self.call_soon(self._start, number, data, workflow, accept)

    def cancel(self, numbers: Iterable[int]) -> None:
        """Cancel those of these episodes that run. One of the same number that is started later is another one.

        They end as "cancelled", whatever their workflows do then.
        """
        self.call_soon(self._cancel, list(numbers))

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop's thread; after ``close`` do nothing.

        The loop is woken once for all calls that come before it runs: each time is a system call.
        """
        self._calls.append((function, args))
        if self._is_woken:
            return
        try:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._take_calls)
        except RuntimeError:  # the loop is closed
            self._drop_calls()
        except BaseException:  # Ctrl-C: one wake too many does no harm, one too few would end all calls
            self._is_woken = False
            raise

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def close(self, timeout_s: float) -> None:
        """Cancel all episodes, wait for their ends, and end the thread.

        Raises:
            RolloutTimeoutError: an episode has not ended within ``timeout_s``.
        """
        try:
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(timeout_s)
        except TimeoutError as error:
            raise RolloutTimeoutError(
                f"episodes that close() cancelled go on after {timeout_s:g} s; a workflow must await, and not compute, "
                "and let asyncio.CancelledError through"
            ) from error
        finally:  # the thread ends by itself once a workflow that computes gives it back
            self._is_closed = True
            self.call_soon(self._loop.stop)
        self._thread.join(timeout_s)

    # --------------------------------------------------------------------------------- in the loop's thread

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_closed:
                # A task of a workflow's own may raise them: it has failed so, and asyncio leaves the loop, too.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
        finally:
            self._loop.close()
            self._drop_calls()

    def _drop_calls(self) -> None:
        """Forget what was left for a loop that is closed."""
        self._calls.clear()
        self._is_woken = False

    def _take_calls(self) -> None:
        self._is_woken = False  # first: who finds it set has left its call before this
        while self._calls:
            function, args = self._calls.popleft()
            self._loop.call_soon(function, *args)

    def _start(self, number: int, data: Any, workflow: Workflow, accept: Accept | None) -> None:
        self._tasks[number] = task = self._loop.create_task(self._run(number, data, workflow, accept))
        task.add_done_callback(lambda _: self._tasks.pop(number, None) if self._tasks.get(number) is task else None)

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if task := self._tasks.pop(number, None):
                task.cancel()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks.values())
        self._cancel(list(self._tasks))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, number: int, data: Any, workflow: Workflow, accept: Accept | None) -> None:
        client = RolloutClient(self._ask, reader=self._reader, defaults=self._defaults)
        trajectories: list[Trajectory] = []
        outcome: Outcome = "rejected"
        error: BaseException | None = None
        try:
            async with asyncio.timeout(self._episode_timeout_s) as limit:
                trajectories = as_trajectories(await _awaitable(workflow.run_episode(client, data)))
            if trajectories and (accept is None or accept(trajectories)):
                outcome = "ended"
        except asyncio.CancelledError:
            outcome, error = "failed", RolloutError("the workflow has cancelled itself")
        except TimeoutError as late:
            outcome, error = "timed_out", self._too_long() if limit.expired() else late
        except GeneratorExit:  # the loop is closed, and nobody runs this any more
            raise
        except BaseException as failed:  # groups of exceptions, and SystemExit, too: somebody waits for the end
            outcome, error = "failed", failed
        if self._tasks.get(number) is not asyncio.current_task():
            # It was cancelled, and another task may run its episode by now: however the workflow has taken that, with
            # an error of its own or a result, it is not that one's end.
            trajectories, outcome, error = [], "cancelled", None
        if error is not None:
            _log.warning("episode %d %s: %s; item %.200r", number, outcome, one_line(error), data)
        self._on_end(EpisodeEnd(Episode(number, data, trajectories), outcome, client.num_sampled, error))

    def _too_long(self) -> RolloutTimeoutError:
        return RolloutTimeoutError(f"it took longer than episode_timeout_s={self._episode_timeout_s:g}")

    async def _ask(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        answer: asyncio.Future[RequestOutput] = self._loop.create_future()

        def set_answer(found: RequestOutput | RlcoreError) -> None:
            if not answer.done():
                answer.set_exception(found) if isinstance(found, RlcoreError) else answer.set_result(found)

        request = self._fleet.submit(prompt, params, lambda found: self.call_soon(set_answer, found))
        try:
            return await answer
        except asyncio.CancelledError:
            self._fleet.cancel(request)
            raise


def _awaitable(result: Any) -> Awaitable[Any]:
    if not inspect.isawaitable(result):
        raise InvalidInputError(f"run_episode() must be `async def`; it returned {result!r:.200}")
    return result
