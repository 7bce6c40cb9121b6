"""Senders or receivers, wherever they are, called together with plain data.

A round is driven by one program (``WorkerParties``: workers of engines; ``RemoteParties``: the other end of a control
channel) or by every rank alike (``SpmdParties``: each calls its own and all learn the answers).
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.errors import CollectiveError, RlcoreError, SyncError, WorkerDiedError, WorkerTimeoutError

Call = tuple[Any, ...]
Exchange = Callable[[bytes], list[bytes]]
"""Gives the bytes of all ranks, by rank; all ranks call it together."""


class LateError(SyncError):
    """A party did not answer within what was left of its round; the round says how long that was in all."""


class Parties(ABC):
    """All senders, or all receivers, of a round, in one order."""

    label: str

    @abstractmethod
    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        """Call ``method`` of all; their results in order.

        Args:
            calls: the arguments of each; None: no arguments.
            timeout_s: the longest that it may take.

        Raises:
            RlcoreError: what the first to fail raised, or that it ended or did not answer in time.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Some run in the calling thread, so that two calls cannot run side by side."""


def call_each(parties: Sequence[object], method: str, calls: Sequence[Call] | None) -> list[Any]:
    """What the worker that holds some of the parties does."""
    each = [()] * len(parties) if calls is None else calls
    return [getattr(party, method)(*arguments) for party, arguments in zip(parties, each, strict=True)]


class LocalParties(Parties):
    """Those of this process."""

    def __init__(self, label: str, parties: Sequence[object]) -> None:
        self.label = label
        self._parties = parties

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        return call_each(self._parties, method, calls)

    def __len__(self) -> int:
        return len(self._parties)

    @property
    def is_here(self) -> bool:
        return True


class WorkerParties(Parties):
    """Those that workers of an engine hold: each has a method ``sync_call(method, calls)`` for its own."""

    def __init__(self, group: WorkerGroup, timeout_s: float) -> None:
        self.label = group.engine
        self._group = group
        self._counts = [len(own) for own in self._each("describe", [None] * len(group.workers), timeout_s)]

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        rest = iter(calls or ())
        own = [None if calls is None else list(itertools.islice(rest, count)) for count in self._counts]
        return [result for results in self._each(method, own, timeout_s) for result in results]

    def _each(self, method: str, calls: Sequence[list[Call] | None], timeout_s: float) -> list[list[Any]]:
        return self._group.call("sync_call", [((method, own), {}) for own in calls], timeout_s=timeout_s)

    def __len__(self) -> int:
        return sum(self._counts)

    @property
    def is_here(self) -> bool:
        return any(worker.process_id == os.getpid() for worker in self._group.workers)


class TimedParties(Parties):
    """Adds the seconds of each call to ``seconds``, by its method."""

    def __init__(self, own: Parties, seconds: Counter[str]) -> None:
        self.label = own.label
        self._own = own
        self._seconds = seconds

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        started = time.perf_counter()
        results = self._own.call(method, calls, timeout_s)
        self._seconds[method] += time.perf_counter() - started  # type: ignore[assignment]  # typeshed counts in int
        return results

    def __len__(self) -> int:
        return len(self._own)

    @property
    def is_here(self) -> bool:
        return self._own.is_here


class JoinedParties(Parties):
    """The parties of several engines, one after the other."""

    def __init__(self, parts: Sequence[Parties]) -> None:
        self.label = " and ".join(part.label for part in parts)
        self._parts = parts

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        rest = iter(calls or ())
        own = [None if calls is None else list(itertools.islice(rest, len(part))) for part in self._parts]
        run = partial(self._call, method, timeout_s)
        if self.is_here:
            found = [run(part, calls_of_part) for part, calls_of_part in zip(self._parts, own, strict=True)]
        else:  # in a collective they wait for each other
            found = at_once(
                [partial(run, part, calls_of_part) for part, calls_of_part in zip(self._parts, own, strict=True)]
            )
        return [result for results in found for result in results]

    @staticmethod
    def _call(method: str, timeout_s: float, part: Parties, calls: list[Call] | None) -> list[Any]:
        return part.call(method, calls, timeout_s)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def is_here(self) -> bool:
        return any(part.is_here for part in self._parts)


class SpmdParties(Parties):
    """Every rank of a world drives the same round, and has some of the parties."""

    def __init__(self, own: Parties, exchange: Exchange, rank: int) -> None:
        self.label = own.label
        self._own = own
        self._exchange = exchange
        counts = [msgspec.msgpack.decode(data, type=int) for data in exchange(msgspec.msgpack.encode(len(own)))]
        self._slice = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        self._count = sum(counts)

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        failure, results = "", []
        error: RlcoreError | None = None
        try:
            results = self._own.call(method, None if calls is None else calls[self._slice], timeout_s)
        except RlcoreError as raised:
            error, failure = raised, str(raised) or type(raised).__name__
        told = [msgspec.msgpack.decode(data) for data in self._exchange(msgspec.msgpack.encode((failure, results)))]
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(told):
            if text:
                raise SyncError(f"{method}() failed on rank {rank}: {text}")
        return [result for _, own_results in told for result in own_results]

    def __len__(self) -> int:
        return self._count

    @property
    def is_here(self) -> bool:
        return True


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """All side by side, the first in the calling thread; of several errors the one that a death caused comes first."""
    with ThreadPoolExecutor(max(1, len(calls) - 1)) as pool:
        beside = [pool.submit(call) for call in calls[1:]]
        errors: list[BaseException] = []
        results = []
        for finish in (calls[0], *(future.result for future in beside)):
            try:
                results.append(finish())
            except Exception as error:
                errors.append(error)
    if errors:
        raise min(errors, key=_remoteness)
    return results


def _remoteness(error: BaseException) -> int:
    """From the cause: in a collective the others fail because one has."""
    if isinstance(error, WorkerDiedError | WorkerTimeoutError):
        return 0
    return 2 if isinstance(error, CollectiveError) else 1
