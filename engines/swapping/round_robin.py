"""A swap between participants in different processes, in rounds.

In each round every participant moves a few blocks. What comes back to a device may take the memory that others freed
in earlier rounds. So one participant's copies to the host overlap with another's copies to the device, and the device
never holds more than before the swap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from rlcore.engines.executors.worker import Worker
from rlcore.engines.offload.transfer import Grant, Progress
from rlcore.engines.offload.undo import undone_by
from rlcore.engines.swapping.participants import Arguments, Reports, Site, SwapParticipant

R = TypeVar("R")


def swap_in_rounds(participants: Sequence[SwapParticipant]) -> Reports:
    """Move everything; after an error everything is where it was, or the message or a note on it says what is not."""
    with ThreadPoolExecutor(len(participants)) as threads:
        rounds = _RoundRobin(participants, threads)
        with undone_by(rounds.take_back):
            rounds.begin()
            rounds.run()
            ended = rounds.call(Worker.end_swap, lambda participant: participant.plans(was_reversed=False))
    reports: Reports = {}
    for participant, results in ended.items():
        reports |= participant.reports(results)
    return reports


class _RoundRobin:
    """The rounds of one swap, and the memory that each site has freed and allocated."""

    def __init__(self, participants: Sequence[SwapParticipant], threads: ThreadPoolExecutor) -> None:
        self._participants = list(participants)
        self._lost: list[SwapParticipant] = []
        self._threads = threads
        self._progress: dict[Site, Progress] = {}

    def begin(self) -> None:
        self._record(self.call(Worker.begin_swap, lambda participant: participant.plans(with_workers=True)))

    def run(self, *, goes_on: bool = False) -> None:
        """Run rounds until nothing is left to move; ``goes_on`` without the participants that fail."""
        while any(self._is_moving(participant) for participant in self._participants):
            self._round(self._grants(), goes_on=goes_on)

    def _round(self, grants: dict[Site, Grant], *, goes_on: bool) -> None:
        def at_each(participant: SwapParticipant) -> list[Arguments]:
            return [((grants[site],), {}) for site in participant.sites]

        self._record(self.call(Worker.swap_step, at_each, goes_on=goes_on))

    def take_back(self) -> str:
        """Bring everything back; return words that say where it is."""
        self._record(self.call(Worker.reverse_swap, lambda one: [((), {})] * len(one.sites), goes_on=True))
        self.run(goes_on=True)
        self.call(Worker.end_swap, lambda participant: participant.plans(was_reversed=True), goes_on=True)
        if self._lost:
            lost = " and ".join(participant.labels for participant in self._lost)
            return f"That could not be undone for {lost}: build or restart what you need of them"
        return "Nothing has moved: everything is where it was"

    def call(
        self,
        method: Callable[..., R],
        arguments: Callable[[SwapParticipant], list[Arguments]],
        *,
        goes_on: bool = False,
    ) -> dict[SwapParticipant, list[R]]:
        """Call all participants at once; return the results by site, or raise the first error after all have ended."""
        elsewhere = [participant for participant in self._participants if not participant.runs_here]
        futures = {one: self._threads.submit(one.call, method, arguments(one)) for one in elsewhere}
        for participant in self._participants:
            if participant.runs_here:
                futures[participant] = _attempt(partial(participant.call, method, arguments(participant)))
        failed = {one: error for one, future in futures.items() if (error := future.exception()) is not None}
        for participant, error in failed.items():
            if not goes_on:
                raise error
            self._participants.remove(participant)
            self._lost.append(participant)
        return {participant: future.result() for participant, future in futures.items() if participant not in failed}

    def _record(self, answers: dict[SwapParticipant, list[Progress]]) -> None:
        for participant, found in answers.items():
            self._progress |= dict(zip(participant.sites, found, strict=True))

    def _is_moving(self, participant: SwapParticipant) -> bool:
        found = [self._progress[site] for site in participant.sites]
        return any(progress.has_device_to_host or progress.has_host_to_device for progress in found)

    def _grants(self) -> dict[Site, Grant]:
        """Return the memory for the next round: the free memory of a device goes to the first site that needs some."""
        free: Counter[str] = Counter()
        for (_, device), progress in self._progress.items():
            free[device] += progress.freed_bytes - progress.allocated_bytes
        grants = {}
        for site, progress in self._progress.items():
            more = max(0, free[site[1]]) if progress.has_host_to_device else 0
            free[site[1]] -= more
            grants[site] = Grant(progress.allocated_bytes + more, self._others_leave(site))
        return grants

    def _others_leave(self, site: Site) -> bool:
        return any(
            progress.has_device_to_host
            for other, progress in self._progress.items()
            if other != site and other[1] == site[1]
        )


def _attempt(call: Callable[[], list[R]]) -> Future[list[R]]:
    """Run it in this thread."""
    future: Future[list[R]] = Future()
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    return future
