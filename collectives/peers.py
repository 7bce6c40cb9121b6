"""The monitor of a group's other ranks: it sees which processes have ended and which operations they wait in."""

from __future__ import annotations

import contextlib
import os
import select
import time
from datetime import timedelta
from typing import Any

from rlcore.collectives.rendezvous import RankInfo, Rendezvous
from rlcore.errors import CollectiveError, CollectiveTimeoutError, PeerDiedError
from rlcore.process.status import start_time

_POLL_S = 1.0
"""A longer wait checks the peers at this interval, and reports to them that it waits."""
_END_DELAY_S = 0.2  # the kernel closes a killed process's sockets before it shows that the process has ended


class PeerMonitor:
    """The waits of one rank for work of several ranks; it names the ranks that caused a failure.

    Ranks count their collective operations. A rank that waits long writes the operation to the store, under its number.
    When a wait fails, the ranks that have not written did not arrive.
    """

    def __init__(self, rendezvous: Rendezvous, label: str) -> None:
        self._rendezvous = rendezvous
        self._label = label
        self._number = 0
        self._has_failed = False
        self._processes: dict[int, int] = {}
        self._ended: list[int] = []
        """Ranks that ended before they could be watched."""
        for rank, info in rendezvous.peers().items():
            if rendezvous.shares_processes_with(info):
                self._watch(rank, info)

    def close(self) -> None:
        """Leave the rendezvous."""
        self._rendezvous.close(ended=self._dead())
        while self._processes:
            os.close(self._processes.popitem()[1])

    def check_alive(self) -> None:
        """Check the processes.

        Raises:
            PeerDiedError: naming the ranks whose processes have ended since they joined.
        """
        if dead := self._dead():
            died = f"forming {self._label} failed: {self._names(dead)} has ended"
            raise self._notified(PeerDiedError(f"{died}; give the next run a new folder or name", ranks=tuple(dead)))

    def notify_failure(self, why: str) -> None:
        """Publish why this rank failed, whose connections close then. The first reason counts."""
        if self._has_failed:
            return
        self._has_failed = True
        with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
            self._rendezvous.write("failed", why)

    def wait(self, work: Any, what: str, timeout_s: float) -> None:
        """Wait for a collective operation of host tensors.

        Raises:
            CollectiveTimeoutError: naming the ranks that did not arrive within ``timeout_s`` seconds.
            PeerDiedError: naming the ranks whose processes have ended.
            CollectiveError: it failed otherwise.
        """
        self._number += 1
        began = time.monotonic()
        poll_s = min(_POLL_S, timeout_s / 4)
        is_reported = False
        while not self._is_done(work, poll_s, what, began, timeout_s):
            if not is_reported:
                self._report_waiting(what)
                is_reported = True
            if dead := self._dead():
                raise self._died(dead, what)
            if time.monotonic() - began >= timeout_s:
                raise self._timed_out(what, timeout_s)

    def wait_for(self, rank: int, work: Any, what: str, timeout_s: float) -> None:
        """Wait as ``wait`` does, for an operation with one other rank."""
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - began < 0.9 * timeout_s:
                raise self.explain(error, what) from error
            text = f"{what} of {self._label} did not end within {timeout_s:g} s: rank {rank} did not take part"
            raise self._notified(CollectiveTimeoutError(text, ranks=(rank,))) from error

    def explain(self, error: BaseException, what: str) -> CollectiveError:
        """Return the cause of an error of the collective library."""
        time.sleep(_END_DELAY_S)
        if dead := self._dead():
            return self._died(dead, what)
        failed = self._rendezvous.read("failed")
        reasons = "".join(f"; before, rank {rank} gave up: {text}" for rank, text in failed.items())
        first_line = str(error).strip().split("\n")[0]
        text = f"{what} of {self._label} failed: {first_line}"
        self.notify_failure(text)
        return CollectiveError(f"{text}{reasons}", ranks=tuple(failed))

    def _is_done(self, work: Any, poll_s: float, what: str, began: float, timeout_s: float) -> bool:
        seconds = min(poll_s, max(0.001, began + timeout_s - time.monotonic()))
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if not work.is_completed():
                return False  # only this poll timed out
            if time.monotonic() - began >= 0.9 * timeout_s:  # the library's own deadline
                raise self._timed_out(what, timeout_s) from error
            raise self.explain(error, what) from error
        return True

    def _died(self, ranks: list[int], what: str) -> CollectiveError:
        names = self._names(ranks)
        text = f"{what} of {self._label} failed: {names} has ended; destroy() the group and make one without it"
        return self._notified(PeerDiedError(text, ranks=tuple(ranks)))

    def _timed_out(self, what: str, timeout_s: float) -> CollectiveError:
        self._report_waiting(what)
        time.sleep(
            min(_POLL_S, timeout_s / 4) + _END_DELAY_S
        )  # after so long a rank that has just arrived has reported it
        waiting = self._rendezvous.read(f"waiting/{self._number}")
        absent = [rank for rank in self._rendezvous.peers() if rank not in waiting]
        elsewhere = {rank: where for rank, where in waiting.items() if where != what}
        parts = [f"{_ranks(absent)} did not arrive"] if absent else []
        parts += [f"rank {rank} waits in {where}" for rank, where in elsewhere.items()]
        reason = "; ".join(parts) or "all ranks wait in it"
        text = f"{what} of {self._label} did not end within {timeout_s:g} s: {reason}"
        return self._notified(CollectiveTimeoutError(text, ranks=tuple(sorted({*absent, *elsewhere}))))

    def _notified(self, error: CollectiveError) -> CollectiveError:
        self.notify_failure(str(error))
        return error

    def _report_waiting(self, what: str) -> None:
        self._rendezvous.write(f"waiting/{self._number}", what)

    def _watch(self, rank: int, info: RankInfo) -> None:
        try:
            descriptor = os.pidfd_open(info.pid)
        except ProcessLookupError:
            self._ended.append(rank)
            return
        if start_time(info.pid) == info.started:
            self._processes[rank] = descriptor
        else:  # another process has its pid by now
            os.close(descriptor)
            self._ended.append(rank)

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {rank} (process {self._rendezvous.infos[rank].pid})" for rank in ranks)

    def _dead(self) -> list[int]:
        poll = select.poll()
        for descriptor in self._processes.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return sorted([*self._ended, *(rank for rank, descriptor in self._processes.items() if descriptor in ended)])


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
