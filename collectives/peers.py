"""The other ranks of a group: whether their processes still run, and what they wait in."""

from __future__ import annotations

import contextlib
import os
import select
import time
from datetime import timedelta
from typing import Any

from rlcore.collectives.rendezvous import Card, Meeting
from rlcore.errors import CollectiveError, CollectiveTimeoutError, PeerDiedError
from rlcore.process.status import start_time

_LOOK_S = 1.0
"""A wait longer than this looks after the peers so often, and tells them that it waits."""
_PARTING_S = 0.2  # the kernel closes a killed process's sockets before it shows that the process has ended


class Peers:
    """Waits for work that other ranks take part in, and says of a failure which of them caused it.

    Ranks count their collective operations. One that waits long writes the operation under its number into the store;
    when a wait fails, the ranks that have not written are those that did not arrive.
    """

    def __init__(self, meeting: Meeting, label: str) -> None:
        self._meeting = meeting
        self._label = label
        self._number = 0
        self._has_given_up = False
        self._processes: dict[int, int] = {}
        self._ended: list[int] = []
        """Before they could be watched."""
        for rank, card in meeting.peers().items():
            if meeting.shares_processes_with(card):
                self._watch(rank, card)

    def close(self) -> None:
        """Leave the meeting."""
        self._meeting.close(ended=self._dead())
        while self._processes:
            os.close(self._processes.popitem()[1])

    def check_alive(self) -> None:
        """Raises PeerDiedError naming the ranks whose processes have ended since they joined."""
        if dead := self._dead():
            died = f"forming {self._label} failed: {self._names(dead)} has ended"
            raise self._told(PeerDiedError(f"{died}; give the next run a new folder or name", ranks=tuple(dead)))

    def give_up(self, why: str) -> None:
        """Tell the others, whose operations fail when this rank's connections go. The first reason counts."""
        if self._has_given_up:
            return
        self._has_given_up = True
        with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
            self._meeting.write("gave up", why)

    def wait(self, work: Any, what: str, timeout_s: float) -> None:
        """Wait for a collective operation of host tensors.

        Raises:
            CollectiveTimeoutError: naming the ranks that did not arrive within ``timeout_s`` seconds.
            PeerDiedError: naming the ranks whose processes have ended.
            CollectiveError: it failed otherwise.
        """
        self._number += 1
        began = time.monotonic()
        look_s = min(_LOOK_S, timeout_s / 4)
        has_told = False
        while not self._is_done(work, look_s, what, began, timeout_s):
            if not has_told:
                self._tell(what)
                has_told = True
            if dead := self._dead():
                raise self._died(dead, what)
            if time.monotonic() - began >= timeout_s:
                raise self._timed_out(what, timeout_s)

    def wait_for(self, rank: int, work: Any, what: str, timeout_s: float) -> None:
        """As ``wait``, for an operation with one other rank."""
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - began < 0.9 * timeout_s:
                raise self.explain(error, what) from error
            text = f"{what} of {self._label} did not end within {timeout_s:g} s: rank {rank} did not take part"
            raise self._told(CollectiveTimeoutError(text, ranks=(rank,))) from error

    def explain(self, error: BaseException, what: str) -> CollectiveError:
        """What lies behind an error of the collective library."""
        time.sleep(_PARTING_S)
        if dead := self._dead():
            return self._died(dead, what)
        gave_up = self._meeting.read("gave up")
        reasons = "".join(f"; before, rank {rank} gave up: {text}" for rank, text in gave_up.items())
        first_line = str(error).strip().split("\n")[0]
        text = f"{what} of {self._label} failed: {first_line}"
        self.give_up(text)
        return CollectiveError(f"{text}{reasons}", ranks=tuple(gave_up))

    def _is_done(self, work: Any, look_s: float, what: str, began: float, timeout_s: float) -> bool:
        seconds = min(look_s, max(0.001, began + timeout_s - time.monotonic()))
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if not work.is_completed():
                return False  # it was this look that timed out
            if time.monotonic() - began >= 0.9 * timeout_s:  # the library's own deadline
                raise self._timed_out(what, timeout_s) from error
            raise self.explain(error, what) from error
        return True

    def _died(self, ranks: list[int], what: str) -> CollectiveError:
        names = self._names(ranks)
        text = f"{what} of {self._label} failed: {names} has ended; destroy() the group and make one without it"
        return self._told(PeerDiedError(text, ranks=tuple(ranks)))

    def _timed_out(self, what: str, timeout_s: float) -> CollectiveError:
        self._tell(what)
        time.sleep(min(_LOOK_S, timeout_s / 4) + _PARTING_S)  # after so long a rank that has just arrived tells it
        waiting = self._meeting.read(f"waiting/{self._number}")
        absent = [rank for rank in self._meeting.peers() if rank not in waiting]
        elsewhere = {rank: where for rank, where in waiting.items() if where != what}
        parts = [f"{_ranks(absent)} did not arrive"] if absent else []
        parts += [f"rank {rank} waits in {where}" for rank, where in elsewhere.items()]
        reason = "; ".join(parts) or "all ranks wait in it"
        text = f"{what} of {self._label} did not end within {timeout_s:g} s: {reason}"
        return self._told(CollectiveTimeoutError(text, ranks=tuple(sorted({*absent, *elsewhere}))))

    def _told(self, error: CollectiveError) -> CollectiveError:
        self.give_up(str(error))
        return error

    def _tell(self, what: str) -> None:
        self._meeting.write(f"waiting/{self._number}", what)

    def _watch(self, rank: int, card: Card) -> None:
        try:
            descriptor = os.pidfd_open(card.pid)
        except ProcessLookupError:
            self._ended.append(rank)
            return
        if start_time(card.pid) == card.started:
            self._processes[rank] = descriptor
        else:  # another process has its number by now
            os.close(descriptor)
            self._ended.append(rank)

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {rank} (process {self._meeting.cards[rank].pid})" for rank in ranks)

    def _dead(self) -> list[int]:
        poll = select.poll()
        for descriptor in self._processes.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return sorted([*self._ended, *(rank for rank, descriptor in self._processes.items() if descriptor in ended)])


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
