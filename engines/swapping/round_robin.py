"""Parties of a swap that live in different processes take turns.

In each round every party moves a few blocks. What comes back to a device may take what has left it in earlier rounds,
so that one party's copies to the host overlap with another's to the device, and never more is on the device than was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from rlcore.engines.offload.copy import Grant, Progress
from rlcore.engines.offload.undo import undone_by
from rlcore.engines.swapping.participants import Arguments, Party, Reports, Site


def take_turns(parties: Sequence[Party]) -> Reports:
    """After an error everything is where it was; the message or a note on it says so, or what is not."""
    with ThreadPoolExecutor(len(parties)) as threads:
        table = _Table(parties, threads)
        with undone_by(table.take_back):
            table.begin()
            table.play()
            ended = table.call("end_turns", lambda party: party.plans(was_reversed=False))
    return {step: reports for party, results in ended.items() for step, reports in party.reports(results).items()}


class _Table:
    """Who has freed and taken what."""

    def __init__(self, parties: Sequence[Party], threads: ThreadPoolExecutor) -> None:
        self._parties = list(parties)
        self._lost: list[Party] = []
        self._threads = threads
        self._progress: dict[Site, Progress] = {}

    def begin(self) -> None:
        self._note(self.call("begin_turns", lambda party: party.plans(with_workers=True)))

    def play(self, *, goes_on: bool = False) -> None:
        """Until all is where it is to be; ``goes_on`` without the parties that fail."""
        while any(self._is_at_work(party) for party in self._parties):
            self._turn(self._grants(), goes_on=goes_on)

    def _turn(self, grants: dict[Site, Grant], *, goes_on: bool) -> None:
        def at_each(party: Party) -> list[Arguments]:
            return [((grants[site],), {}) for site in party.sites]

        self._note(self.call("take_turn", at_each, goes_on=goes_on))

    def take_back(self) -> str:
        """Bring everything back; says where it is."""
        self._note(self.call("turn_back", lambda party: [((), {})] * len(party.sites), goes_on=True))
        self.play(goes_on=True)
        self.call("end_turns", lambda party: party.plans(was_reversed=True), goes_on=True)
        if self._lost:
            lost = " and ".join(party.labels for party in self._lost)
            return f"That could not be undone for {lost}: build or restart what you need of them"
        return "Nothing has moved: everything is where it was"

    def call(
        self, method: str, arguments: Callable[[Party], list[Arguments]], *, goes_on: bool = False
    ) -> dict[Party, list[Any]]:
        """All parties at once, results by site; after all have answered the first error is raised."""
        elsewhere = [party for party in self._parties if not party.runs_here]
        futures = {party: self._threads.submit(party.call, method, arguments(party)) for party in elsewhere}
        for party in self._parties:
            if party.runs_here:
                futures[party] = _attempt(partial(party.call, method, arguments(party)))
        failed = {party: error for party, future in futures.items() if (error := future.exception()) is not None}
        for party, error in failed.items():
            if not goes_on:
                raise error
            self._parties.remove(party)
            self._lost.append(party)
        return {party: future.result() for party, future in futures.items() if party not in failed}

    def _note(self, answers: dict[Party, list[Progress]]) -> None:
        for party, found in answers.items():
            self._progress |= dict(zip(party.sites, found, strict=True))

    def _is_at_work(self, party: Party) -> bool:
        return any(self._progress[site].is_leaving or self._progress[site].is_arriving for site in party.sites)

    def _grants(self) -> dict[Site, Grant]:
        """What each may take in its next turn: the first that wants something on a device gets what is free there."""
        free: Counter[str] = Counter()
        for (_, device), progress in self._progress.items():
            free[device] += progress.freed_bytes - progress.taken_bytes
        grants = {}
        for site, progress in self._progress.items():
            more = max(0, free[site[1]]) if progress.is_arriving else 0
            free[site[1]] -= more
            grants[site] = Grant(progress.taken_bytes + more, self._others_leave(site))
        return grants

    def _others_leave(self, site: Site) -> bool:
        return any(
            progress.is_leaving for other, progress in self._progress.items() if other != site and other[1] == site[1]
        )


def _attempt(call: Callable[[], list[Any]]) -> Future[list[Any]]:
    """In this thread."""
    future: Future[list[Any]] = Future()
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    return future
