"""``Pacing``: how far the samplers run ahead of the trainer, within the staleness bound.

Where samplers are faster than the trainer, AReaL's capacity fills up with finished episodes, which only grow old while
they wait: each batch is then as stale as the bound allows, and no second is won. So the samplers run ahead by as many
episodes as keep the trainer from waiting, and the bound is a bound, not a target.

Once a version the pacing looks at the slack: the episodes that were ready when the trainer came, less those that it
wanted. Of the latest ``max_staleness + 1`` versions, the time in which a change has shown:

* a slack above 0 in each is a standing queue: the samplers run ahead by the least of them less. A queue that empties
  now and then is none: it bridges what takes longer by chance (CoDel, Nichols and Jacobson 2012, ACM Queue 10(5));
* a slack below 0 in two: the samplers run ahead by the lesser shortage more. One alone may be an evaluation, or the
  beginning.
"""

from __future__ import annotations

from rlcore.rollout.staleness import StalenessBound


class Pacing:
    """Sets ``ahead`` of a bound. It is plain data: no threads, no clock.

    It begins with one batch ahead, the least with which samplers and trainer work together.
    """

    def __init__(self, bound: StalenessBound) -> None:
        self._bound = bound
        self._most = bound.max_staleness * bound.batch_size
        self._least = min(self._most, bound.batch_size)
        bound.ahead = self._least
        self._slack: int | None = None
        """The least slack of the waits of this version."""
        self._slacks: list[int] = []
        """The slack of the latest versions, since ``ahead`` last changed."""

    def note_wait(self, wanted: int) -> None:
        """Note that the trainer comes for so many episodes."""
        slack = len(self._bound.ready) - wanted
        self._slack = slack if self._slack is None else min(slack, self._slack)

    def note_version(self) -> None:
        """Note that the trainer has taken what it takes in this version."""
        if self._slack is None:
            return
        self._slacks = [*self._slacks, self._slack][-self._window :]
        self._slack = None
        if len(self._slacks) == self._window and min(self._slacks) > 0:
            self._run_ahead(self._bound.ahead - min(self._slacks))
        elif len(self._slacks) > 1 and (short := -sorted(self._slacks)[1]) > 0:
            self._run_ahead(self._bound.ahead + short)

    def allow(self, missing: int) -> None:
        """Let so many more episodes begin, if the bound does: somebody waits for them who takes more than a batch."""
        if missing > 0:
            self._run_ahead(self._bound.ahead + missing)

    @property
    def _window(self) -> int:
        return max(2, self._bound.max_staleness + 1)

    def _run_ahead(self, episodes: int) -> None:
        episodes = min(max(episodes, self._least), self._most)
        if episodes != self._bound.ahead:
            self._bound.ahead = episodes
            self._slacks.clear()  # they are of the time before
