"""The staleness bound: when an episode may begin, and which finished ones are given to the trainer.

Names: version v of the weights now, batch size B, ``max_staleness`` S. An episode that is trained on at version v and
whose oldest sampled token is of version u has staleness v - u.

**Admission** is the capacity of AReaL (Fu et al. 2025, arXiv 2505.24298; its ``StalenessManager``):

    min(max_concurrent - running, (S + v + 1) B - (accepted + running))

where ``accepted`` counts the episodes that ended well since the beginning. With B episodes trained on in each earlier
version, and ``given`` in this one, accepted = v B + given + ready. So the second term is what is used here:

    S B + max(0, B - given) - (ready + running)

It needs no history, so that a version that took more or fewer than B episodes changes nothing later. S B is the most
that may run ahead; ``ahead`` is how many do, which a ``Pacing`` makes fewer where they would only wait.

**Order.** Admission alone does not hold the bound: an episode that takes long may be overtaken by later ones, any
number of times. So episodes are given in order of their version, oldest first, among those that have ended; and the
bound waits for a running episode exactly when giving later ones in its place would leave more old episodes than the
next batches have room for, within their S versions (the condition of an earliest-deadline-first schedule). With B
episodes a version nothing is ever too old, and no sampled token is thrown away.

Where the trainer takes fewer than B episodes in a version, or the version jumps, some may become too old all the same.
``set_version`` returns these, for the caller to begin anew: the bound holds always.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlcore.arguments import COUNT, WHOLE_FROM_0, optional, takes
from rlcore.errors import InvalidInputError


class StalenessBound:
    """Decides which episodes begin and which are given. It is plain data: no threads, no clock.

    Args:
        max_staleness: the most versions that the oldest token of an episode may lag behind when it is trained on.
        batch_size: episodes that are trained on in one version of the weights.
        max_concurrent: the most episodes that run together; None leaves that to the staleness.
    """

    @takes("StalenessBound", max_staleness=WHOLE_FROM_0, batch_size=COUNT, max_concurrent=optional(COUNT))
    def __init__(self, *, max_staleness: int, batch_size: int, max_concurrent: int | None = None) -> None:
        self.max_staleness, self.batch_size, self.max_concurrent = max_staleness, batch_size, max_concurrent
        self.ahead = max_staleness * batch_size
        """Episodes that may run or wait beside the ones for this version; at most ``max_staleness * batch_size``."""
        self.version = 0
        self.running: dict[int, int] = {}
        """Number of each episode that runs -> the version that it began with."""
        self.ready: dict[int, int] = {}
        """Number of each episode that has ended and is not given yet -> the version of its oldest token."""
        self._given = 0

    @property
    def room(self) -> int:
        """The number of episodes that may still begin with this version, together or one after the other."""
        left_in_version = max(0, self.batch_size - self._given)
        return max(0, self.ahead + left_in_version - len(self.ready) - len(self.running))

    @property
    def capacity(self) -> int:
        """The number of episodes that may begin now, at least 0."""
        if self.max_concurrent is None:
            return self.room
        return max(0, min(self.max_concurrent - len(self.running), self.room))

    def begin(self, number: int) -> None:
        """Note that an episode begins, with the version of now.

        Raises:
            InvalidInputError: the capacity is 0.
        """
        if not self.capacity:
            raise InvalidInputError(f"episode {number} must not begin: the capacity is 0; wait for another version")
        self.running[number] = self.version

    def end(self, number: int, oldest_version: int | None = None) -> bool:
        """Note that an episode has ended well; return False if it is too old already, and is not kept.

        Args:
            oldest_version: of its tokens; None means the version that it began with.

        Raises:
            InvalidInputError: no such episode runs.
        """
        if number not in self.running:
            raise InvalidInputError(f"end() takes the number of an episode that runs, got {number!r}")
        began = self.running.pop(number)
        oldest = began if oldest_version is None else oldest_version
        if self.is_too_old(oldest):
            return False
        self.ready[number] = oldest
        return True

    def drop(self, number: int) -> None:
        """Note that an episode was rejected, has failed or is forgotten: another one may begin in its place."""
        self.running.pop(number, None)
        self.ready.pop(number, None)

    @takes("choose()", count=COUNT)
    def choose(self, count: int) -> list[int]:
        """Return the numbers of ``count`` episodes to give now, oldest first; [] means to wait for running ones."""
        chosen = _oldest_first(self.ready)[:count]
        if len(chosen) < count:
            return []
        best = _oldest_first(self.ready | self.running)[:count]
        return chosen if self._num_late_after(chosen) <= self._num_late_after(best) else []

    def give(self, numbers: Iterable[int]) -> None:
        """Note that these episodes are trained on in this version.

        Raises:
            InvalidInputError: one of them is not ready; none is noted then.
        """
        numbers = list(numbers)
        if unknown := [number for number in numbers if number not in self.ready]:
            raise InvalidInputError(f"give() takes numbers of episodes that are ready, got {unknown[0]!r}")
        for number in numbers:
            del self.ready[number]
            self._given += 1

    def set_version(self, version: int) -> list[int]:
        """Note new weights; return the numbers of the episodes that are too old from now on, which are forgotten."""
        if type(version) is not int or version < self.version:
            raise InvalidInputError(
                f"set_version() takes a whole number of at least {self.version}, the version of now, got {version!r}"
            )
        if version > self.version:
            self.version, self._given = version, 0
        too_old = [number for number, oldest in (self.ready | self.running).items() if self.is_too_old(oldest)]
        for number in too_old:
            self.drop(number)
        return too_old

    def is_too_old(self, oldest_version: int) -> bool:
        return self.version - oldest_version > self.max_staleness

    def _num_late_after(self, given: list[int]) -> int:
        """Return how many of the others the coming batches could not take in time, once ``given`` are given."""
        now = set(given)
        others = [oldest for number, oldest in (self.ready | self.running).items() if number not in now]
        room = max(0, self.batch_size - self._given - len(given))
        most_late = 0
        for versions_left in range(self.max_staleness + 1):
            due = sum(oldest + self.max_staleness <= self.version + versions_left for oldest in others)
            most_late = max(most_late, due - room - versions_left * self.batch_size)
        return most_late


def _oldest_first(versions: dict[int, int]) -> list[int]:
    return sorted(versions, key=lambda number: (versions[number], number))
