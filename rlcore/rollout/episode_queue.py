"""``EpisodeQueue``: the items that wait for an episode, the episodes that run, and those that wait for the trainer.

It also counts what became of them, and is all that a checkpoint keeps of a rollout.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from rlcore.errors import InvalidInputError, StateError
from rlcore.rollout.episode import Episode, EpisodeEnd
from rlcore.rollout.item_source import ItemSource
from rlcore.rollout.staleness import StalenessBound
from rlcore.rollout.trajectory import Trajectory

_FORMAT = 1
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Source(msgspec.Struct):
    num_taken: _Count
    loader: Any


class QueueState(msgspec.Struct):
    """A state of an ``EpisodeQueue``: references to items and to trajectories, which do not change any more."""

    version: _Count
    next_number: _Count
    queued: list[tuple[_Count, Any]]
    ready: list[tuple[_Count, Any, list[Trajectory]]]
    counts: dict[str, int]
    staleness: list[tuple[int, int]]
    source: _Source

    def plain(self) -> dict[str, Any]:
        """Return it as plain data. This copies each token: call it without a lock."""
        ready = [[number, data, [one.plain() for one in each]] for number, data, each in self.ready]
        return msgspec.structs.asdict(self) | {
            "format": _FORMAT,
            "queued": [list(item) for item in self.queued],
            "ready": ready,
            "staleness": [list(item) for item in self.staleness],
            "source": msgspec.structs.asdict(self.source),
        }


class EpisodeQueue:
    """Keeps items and episodes in order. It is plain data: no threads, no clock.

    Locks: it has none. Whoever shares it between threads holds a lock around each use of a method or an attribute. No
    method waits, and only ``snapshot`` runs a user's code: that of the dataloader.

    An episode that somebody waits for by itself has a number, and is counted, but is not kept here ("direct").

    Args:
        bound: is asked before each episode, and told of what becomes of it.
    """

    def __init__(self, bound: StalenessBound) -> None:
        self.bound = bound
        self.source = ItemSource()
        self.queued: deque[tuple[int, Any]] = deque()
        """Number and item of each episode that has not begun."""
        self.ready: dict[int, Episode] = {}
        self._running: dict[int, Any] = {}
        """The item of each episode that runs."""
        self._next_number = 0
        self.counts: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.failures_in_row = 0
        """The number of episodes that failed since one did not; direct ones do not count."""
        self.last_failure: BaseException | None = None
        """The error of the last of them."""
        self.rejections_in_row = 0

    def add(self, data: Any) -> int:
        """Queue an item; return the number of its episode."""
        number = self._new_number()
        self.queued.append((number, data))
        return number

    @property
    def num_short(self) -> int:
        """How many more items may begin now or with the next version than are queued; less than 0 for fewer."""
        return self.bound.room + self.bound.batch_size - len(self.queued)

    def begin(self) -> tuple[int, Any]:
        """Note that the next episode begins; return its number and item."""
        number, data = self.queued.popleft()
        self.bound.begin(number)
        self._running[number] = data
        self.counts["begun"] += 1
        return number, data

    def begin_direct(self) -> int:
        """Note that a direct episode begins; return its number."""
        self.counts["begun"] += 1
        return self._new_number()

    def end(self, end: EpisodeEnd, *, is_direct: bool) -> None:
        """Count how an episode ended; keep it if it ended well, or queue it again if it has become too stale."""
        self.counts["tokens_sampled"] += end.num_sampled
        if end.outcome == "cancelled":
            self.counts["tokens_discarded"] += end.num_sampled
            return
        self.counts[end.outcome] += 1
        if not is_direct:  # who waits for a direct episode is told of it
            self.failures_in_row = self.failures_in_row + 1 if end.error is not None else 0
            self.last_failure = end.error
        self.rejections_in_row = self.rejections_in_row + 1 if end.outcome == "rejected" else 0
        is_used = end.is_good if is_direct else self._keep(end)
        if end.outcome == "rejected":
            self.counts["tokens_rejected"] += end.num_sampled
        elif not is_used:
            self.counts["tokens_discarded"] += end.num_sampled

    def give(self, numbers: Sequence[int]) -> list[Episode]:
        """Return these episodes, which are ready, for the trainer, and forget them."""
        self.bound.give(numbers)
        episodes = [self.ready.pop(number) for number in numbers]
        self.count_given(episodes)
        return episodes

    def count_given(self, episodes: Sequence[Episode]) -> None:
        """Count episodes that the trainer takes now."""
        for one in episodes:
            self.counts["given"] += 1
            if (oldest := one.oldest_version) is not None:
                self.staleness[self.bound.version - oldest] += 1

    def set_version(self, version: int) -> list[int]:
        """Note new weights, and queue what is too stale from now on again, at the head.

        Returns:
            the numbers of those that run, which are to be cancelled.
        """
        to_cancel = []
        for number in sorted(self.bound.set_version(version), reverse=True):
            if (ready := self.ready.pop(number, None)) is not None:
                self.counts["tokens_discarded"] += ready.num_sampled
                data = ready.data
            else:
                data = self._running.pop(number)
                to_cancel.append(number)
            self._queue_again(number, data)
        return to_cancel

    def snapshot(self) -> QueueState:
        """Return the state; episodes that run are queued in it, and so are those that are no plain data."""
        plain = {number: one for number, one in self.ready.items() if all(t.is_plain for t in one.trajectories)}
        again = self._running | {number: one.data for number, one in self.ready.items() if number not in plain}
        return QueueState(
            version=self.bound.version,
            next_number=self._next_number,
            queued=[*sorted(again.items()), *self.queued],
            ready=[(one.number, one.data, list(one.trajectories)) for _, one in sorted(plain.items())],
            counts=dict(self.counts),
            staleness=sorted(self.staleness.items()),
            source=_Source(**self.source.state_dict()),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the plain data of a ``snapshot``.

        Raises:
            StateError: it has had an episode already.
            InvalidInputError: it is no such state.
        """
        if self._next_number:
            raise StateError("load_state_dict() comes before the first episode; make a new controller")
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise InvalidInputError(f"load_state_dict() takes what state_dict() returned, got {state!r:.200}")
        try:
            found = msgspec.convert(state, QueueState)
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"load_state_dict() takes what state_dict() returned: {error}") from error
        self.bound.set_version(found.version)
        self._next_number = found.next_number
        self.counts, self.staleness = Counter(found.counts), Counter(dict(found.staleness))
        for number, data, trajectories in found.ready:
            episode = Episode(number, data, trajectories)
            self.ready[number] = episode
            oldest = episode.oldest_version
            self.bound.ready[number] = self.bound.version if oldest is None else oldest
        self.queued.extend(found.queued)
        self.set_version(found.version)  # the bound may be another one than that of the state
        self.source.load_state_dict(msgspec.structs.asdict(found.source))

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _keep(self, end: EpisodeEnd) -> bool:
        """Keep an episode that ended well; return False if it is of no use."""
        episode = end.episode
        if episode.number not in self.bound.running:
            return False  # it began anew meanwhile, or nobody waits for it any more
        del self._running[episode.number]
        if not end.is_good:
            self.bound.drop(episode.number)
            return False
        if not self.bound.end(episode.number, episode.oldest_version):
            self._queue_again(episode.number, episode.data)
            return False
        self.ready[episode.number] = episode
        return True

    def _queue_again(self, number: int, data: Any) -> None:
        self.counts["too_stale"] += 1
        self.queued.appendleft((number, data))
