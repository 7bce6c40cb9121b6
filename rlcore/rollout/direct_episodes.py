"""``DirectEpisodes``: episodes that begin now, for somebody who waits for all of them.

The staleness bound does not count them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlcore.errors import RolloutError, RolloutTimeoutError
from rlcore.rollout.episode import Episode, EpisodeEnd, in_words
from rlcore.rollout.episode_queue import EpisodeQueue
from rlcore.rollout.episode_runner import Accept, EpisodeRunner
from rlcore.rollout.waiting import Waiting
from rlcore.rollout.workflow import Workflow


class DirectEpisodes:
    """Runs direct episodes, and knows which are under way.

    Args:
        lock: of what the controller's threads share.
        queue: counts them, and gives them numbers.
    """

    def __init__(self, lock: threading.Condition, queue: EpisodeQueue, runner: EpisodeRunner, waiting: Waiting) -> None:
        self._lock, self._queue, self._runner, self._waiting = lock, queue, runner, waiting
        self._under_way: dict[int, Future[EpisodeEnd]] = {}

    def run(
        self,
        items: Sequence[Any],
        workflow: Workflow,
        accept: Accept | None,
        *,
        timeout_s: float | None,
        check: Callable[[], None],
    ) -> list[Episode]:
        """Run an episode for each item; return those that ended well, in order.

        Args:
            check: raises, called with the lock held, when they cannot begin or go on.

        Raises:
            RolloutTimeoutError: they did not end in time, and are cancelled.
            RolloutError: none of them has ended well.
        """
        with self._lock:
            check()
            numbers = [self._queue.begin_direct() for _ in items]
            futures: list[Future[EpisodeEnd]] = [Future() for _ in items]
            self._under_way |= zip(numbers, futures, strict=True)
        try:
            for number, data in zip(numbers, items, strict=True):
                self._runner.start(number, data, workflow, accept)
            self._await(futures, timeout_s, check)
        except BaseException:  # Ctrl-C too
            self._runner.cancel(numbers)
            raise
        finally:
            with self._lock:
                for number in numbers:
                    self._under_way.pop(number, None)
        ends = [future.result() for future in futures]
        if not (episodes := [end.episode for end in ends if end.is_good]):
            last = next((end.error for end in reversed(ends) if end.error is not None), None)
            raise RolloutError(f"none of {len(items)} episodes ended well: {in_words(last)}") from last
        return episodes

    def _await(self, futures: Sequence[Future[EpisodeEnd]], timeout_s: float | None, check: Callable[[], None]) -> None:
        def is_ready() -> bool:
            if all(future.done() for future in futures):
                return True
            check()
            return False

        if not self._waiting.until(is_ready, timeout_s):
            num_ended = sum(future.done() for future in futures)
            raise RolloutTimeoutError(f"{num_ended} of {len(futures)} episodes ended within {timeout_s:g} s")

    def has(self, number: int) -> bool:
        """Return True if it is one of them. It is called with the lock held."""
        return number in self._under_way

    def note_end(self, end: EpisodeEnd) -> None:
        """Note that one of them has ended, but for a cancellation. It is called with the lock held."""
        self._under_way[end.episode.number].set_result(end)
