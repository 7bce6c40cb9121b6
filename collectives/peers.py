"""The monitor of a group's other ranks: it sees which processes have ended and which operations they wait in."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import Counter
from datetime import timedelta

import msgspec
from torch.distributed import Work

from rlcore.collectives.connecting import Connecting, StillConnectingError
from rlcore.collectives.rendezvous import RankInfo, Rendezvous
from rlcore.collectives.waiting_thread import WaitingThread
from rlcore.errors import CollectiveError, CollectiveTimeoutError, PeerDiedError
from rlcore.process.status import start_time

_POLL_S = 1.0
"""A longer wait checks the peers at this interval, and reports to them that it waits."""
_END_DELAY_S = 0.2  # the kernel closes a killed process's sockets before it shows that the process has ended


class FailureNote(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a rank that cannot go on to the others.

    A rank that only suffers from another one names that one; one with an error of its own names itself.
    """

    why: str
    ranks: tuple[int, ...]
    """The ranks at fault, as far as this one knows."""
    is_end: bool = False
    """Its process is about to end."""


class PeerMonitor:
    """The waits of one rank for work of several ranks; it names the ranks that caused a failure.

    Ranks count their operations: those of all ranks, and those of each pair. A rank that refuses an operation says so
    under its number, and a rank that waits long looks there. It also writes that it waits: when a wait has failed, the
    ranks that have not written did not arrive.
    """

    def __init__(self, rendezvous: Rendezvous, label: str) -> None:
        self._rendezvous = rendezvous
        self._label = label
        self._numbers: Counter[str] = Counter()
        self._operation = ""
        self._step = 0
        self._has_failed = False
        self._threads: list[WaitingThread] = []
        """Threads that wait for nothing now."""
        self._processes: dict[int, int] = {}
        self._ended: list[int] = []
        """Ranks that ended before they could be watched."""
        for rank, info in rendezvous.peers().items():
            if rendezvous.shares_processes_with(info):
                self._watch(rank, info)

    def close(self) -> None:
        """Leave the rendezvous."""
        while self._threads:
            self._threads.pop().end()
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

    def begin(self, among: str) -> None:
        """Count an operation of the ranks ``among``, the same word on each of them; it may have several steps."""
        self._numbers[among] += 1
        self._operation, self._step = f"{among}/{self._numbers[among]}", 0

    def notify_refusal(self, why: str) -> None:
        """Publish why this rank does not take part in the operation that it has begun. The group goes on."""
        with contextlib.suppress(Exception):
            self._rendezvous.write(f"refused/{self._operation}", why)

    def notify_failure(self, why: str, ranks: tuple[int, ...] | None = None, *, is_end: bool = False) -> None:
        """Publish why this rank failed, whose connections close then. The first reason counts.

        Args:
            ranks: those at fault; by default this rank itself.
        """
        if self._has_failed:
            return
        self._has_failed = True
        note = FailureNote(why=why, ranks=(self._rendezvous.rank,) if ranks is None else ranks, is_end=is_end)
        with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
            self._rendezvous.write("failed", msgspec.json.encode(note).decode())

    def wait(self, work: Work | Connecting, what: str, timeout_s: float) -> None:
        """Wait for one step of an operation of all ranks on host tensors, or until their devices are connected.

        Raises:
            CollectiveTimeoutError: naming the ranks that did not arrive within ``timeout_s`` seconds.
            PeerDiedError: naming the ranks whose processes have ended.
            CollectiveError: another rank refused it, or failed, and is named; or it failed otherwise.
        """
        self._step += 1
        began = time.monotonic()
        poll_s = min(_POLL_S, timeout_s / 4)
        is_reported = False
        while not self._is_done(work, poll_s, what, began, timeout_s):
            if not is_reported:
                self._report_waiting(what)
                is_reported = True
            self._check_peers(what, list(self._rendezvous.peers()), follows_victims=False)
            if time.monotonic() - began >= timeout_s:
                raise self._timed_out(what, timeout_s)

    def wait_for(self, rank: int, work: Work, what: str, timeout_s: float) -> None:
        """Wait as ``wait`` does, for an operation with one other rank."""
        began = time.monotonic()
        thread = self._free_thread()
        try:
            thread.begin(work, timeout_s)
            while not thread.is_done(min(_POLL_S, timeout_s / 4)):
                self._check_peers(what, [rank], follows_victims=True)
        except BaseException:  # Ctrl-C too
            thread.end()
            raise
        error = thread.error
        self._threads.append(thread)
        if error is None:
            return
        if time.monotonic() - began < 0.9 * timeout_s:
            raise self.explain(error, what) from error
        text = f"{what} of {self._label} did not end within {timeout_s:g} s: rank {rank} did not take part"
        raise self._notified(CollectiveTimeoutError(text, ranks=(rank,))) from error

    def _free_thread(self) -> WaitingThread:
        try:
            return self._threads.pop()
        except IndexError:  # the first, or as many are in use: threads of the caller may send side by side
            return WaitingThread()

    def explain(self, error: BaseException, what: str, ranks: tuple[int, ...] = ()) -> CollectiveError:
        """Return the cause of an error of the collective library; ``ranks`` are at fault if none has told of one."""
        time.sleep(_END_DELAY_S)
        first_line = str(error).strip().split("\n")[0]
        everyone = list(self._rendezvous.peers())
        failed = f"{what} of {self._label} failed"
        return self._cause(what, everyone, failed, follows_victims=True) or self._notified(
            CollectiveError(f"{failed}: {first_line}", ranks=ranks)
        )

    def _check_peers(self, what: str, ranks: list[int], *, follows_victims: bool) -> None:
        """Raise an error if one of ``ranks``, for which this rank waits, cannot come any more.

        A rank that waits for all leaves those that only ran out of time: its own time, and error, are about to come.
        """
        failed = f"{what} of {self._label} failed"
        refusals = {rank: why for rank, why in self._notes(f"refused/{self._operation}").items() if rank in ranks}
        if refusals:
            reasons = "; ".join(f"rank {rank} refused it: {why}" for rank, why in refusals.items())
            raise self._notified(CollectiveError(f"{failed}: {reasons}", ranks=tuple(refusals)))
        if error := self._cause(what, ranks, failed, follows_victims=follows_victims):
            raise error

    def _cause(self, what: str, ranks: list[int], failed: str, *, follows_victims: bool) -> CollectiveError | None:
        """Return the error by which ``ranks`` cannot go on; None if nobody knows of one."""
        notes = {rank: msgspec.json.decode(text, type=FailureNote) for rank, text in self._notes("failed").items()}
        notes = {rank: note for rank, note in notes.items() if rank in ranks}
        gone = {rank: "" for rank in self._dead() if rank in ranks and rank not in notes}
        gone |= {rank: f" {note.why}".rstrip() for rank, note in notes.items() if note.is_end}
        causes = {rank: note for rank, note in notes.items() if rank in note.ranks and rank not in gone}
        victims = {rank: note for rank, note in notes.items() if rank not in causes and rank not in gone}
        reported = causes or (victims if follows_victims and not gone else {})
        reasons = "".join(f"; before, rank {rank} gave up: {note.why}" for rank, note in reported.items())
        blamed = tuple(
            sorted({*gone, *(rank for note in reported.values() for rank in note.ranks)} - {self._rendezvous.rank})
        )
        if gone:
            names = ", ".join(f"{self._names([rank])} has ended{why}" for rank, why in sorted(gone.items()))
            text = f"{what} of {self._label} failed: {names}; destroy() the group and make one without it{reasons}"
            return self._notified(PeerDiedError(text, ranks=blamed))
        return self._notified(CollectiveError(f"{failed}{reasons}", ranks=blamed)) if reported else None

    def _notes(self, key: str) -> dict[int, str]:
        with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
            return self._rendezvous.read(key)
        return {}

    def _is_done(self, work: Work | Connecting, poll_s: float, what: str, began: float, timeout_s: float) -> bool:
        seconds = min(poll_s, max(0.001, began + timeout_s - time.monotonic()))
        try:
            work.wait(timedelta(seconds=seconds))
        except StillConnectingError:  # it may be completed by now, and is asked again
            return False
        except RuntimeError as error:
            if not work.is_completed():
                return False  # only this poll timed out
            if time.monotonic() - began >= 0.9 * timeout_s:  # the library's own deadline
                raise self._timed_out(what, timeout_s) from error
            own = (self._rendezvous.rank,) if isinstance(work, Connecting) else ()  # others may never hear of it
            raise self.explain(error, what, own) from error
        return True

    def _timed_out(self, what: str, timeout_s: float) -> CollectiveError:
        self._report_waiting(what)
        time.sleep(
            min(_POLL_S, timeout_s / 4) + _END_DELAY_S
        )  # after so long a rank that has just arrived has reported it
        waiting = self._notes(self._step_key())
        absent = [rank for rank in self._rendezvous.peers() if rank not in waiting]
        elsewhere = {rank: where for rank, where in waiting.items() if where != what}
        parts = [f"{_ranks(absent)} did not arrive"] if absent else []
        parts += [f"rank {rank} waits in {where}" for rank, where in elsewhere.items()]
        reason = "; ".join(parts) or "all ranks wait in it"
        text = f"{what} of {self._label} did not end within {timeout_s:g} s: {reason}"
        return self._notified(CollectiveTimeoutError(text, ranks=tuple(sorted({*absent, *elsewhere}))))

    def _notified(self, error: CollectiveError) -> CollectiveError:
        self.notify_failure(str(error), error.ranks)
        return error

    def _report_waiting(self, what: str) -> None:
        with contextlib.suppress(Exception):
            self._rendezvous.write(self._step_key(), what)

    def _step_key(self) -> str:
        return f"waiting/{self._operation}.{self._step}"

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
