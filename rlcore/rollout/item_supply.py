"""``ItemSupply``: brings the items of a dataloader to the ``EpisodeQueue``, however long the dataloader takes."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from rlcore.rollout.episode_queue import EpisodeQueue


class ItemSupply:
    """Runs the dataloader without the controller's lock, for which the event loop would wait.

    It has a lock of its own, so that items keep their order. Who holds the controller's must not wait for that one.

    Args:
        changed: its lock is the controller's.
    """

    def __init__(self, queue: EpisodeQueue, changed: threading.Condition) -> None:
        self._queue, self._changed = queue, changed
        self._lock = threading.RLock()
        self._taken: deque[Any] = deque()
        """Items that are not queued yet: Ctrl-C in the wait for the controller's lock must not lose them."""

    def use(self, dataloader: Iterable[Any]) -> None:
        """Take items of ``dataloader`` from now on; see ``ItemSource.use``."""
        with self._lock:
            self._queue.source.use(dataloader)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, the controller's lock is held, nobody takes items, and all that were taken are queued."""
        with self._lock, self._changed:
            self._queue_taken()
            yield

    @property
    def num_short(self) -> int:
        """The number of items that ``fill`` would queue now. It is asked with the controller's lock held."""
        return self._queue.num_short if self._queue.source.is_used else 0

    def fill(self) -> None:
        """Queue as many items as may begin now, and as many as may begin with the next version.

        Episodes may begin and end meanwhile, without end: it takes no more than what is short when it is called.
        """
        for _ in range(self._queue_taken()):
            with self._lock:
                if self._queue_taken() <= 0:
                    return
                self._taken.extend(self._queue.source.take())
                self._queue_taken()

    def _queue_taken(self) -> int:
        """Queue the items that were taken; return how many more are short."""
        with self._changed:
            while self._taken:
                self._queue.add(self._taken.popleft())
            return self.num_short
