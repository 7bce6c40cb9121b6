"""All senders, or all receivers, of a round, wherever they are: called together, with plain data.

A round is driven by one program (``WorkerPeers``: workers of engines; ``RemotePeer``: the other end of a control
channel) or by every rank alike (``SpmdPeers``: each calls its own, and all learn the results).
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
from rlcore.engines.weight_sync.messages import decoded
from rlcore.errors import CollectiveError, SyncError, WorkerDiedError, WorkerTimeoutError
from rlcore.process.status import process_name

Call = tuple[Any, ...]
"""The arguments of one call."""
AllGather = Callable[[bytes], list[bytes]]
"""Returns the bytes of all ranks, by rank; all ranks call it together."""


class LateError(SyncError):
    """A peer did not answer within the time left of its round; the round says how long that was in all."""


class SyncPeers(ABC):
    """All senders, or all receivers, of a round, in one order."""

    label: str

    @abstractmethod
    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        """Call ``method`` of all peers; returns their results in order.

        Args:
            calls: the arguments for each; None: no arguments.
            timeout_s: the longest that it may take.

        Raises:
            RlcoreError: the error of the first that fails, which may be that it ended or did not answer in time.
        """

    def start(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> Callable[[], list[Any]]:
        """Do what this process does of ``call``; returns a function that does the rest, and returns the results.

        Two sides may be started side by side. What is left is done one after the other, in one order on all ranks.
        """
        results = self.call(method, calls, timeout_s)
        return lambda: results

    @abstractmethod
    def __len__(self) -> int:
        """Return how many peers there are."""

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Some run in the calling thread, so that two calls cannot run side by side."""


def call_each(peers: Sequence[object], method: str, calls: Sequence[Call] | None) -> list[Any]:
    """Call a method of each peer in the worker that holds them; returns their results in order."""
    each = [()] * len(peers) if calls is None else calls
    return [getattr(peer, method)(*arguments) for peer, arguments in zip(peers, each, strict=True)]


class LocalPeers(SyncPeers):
    """Peers of this process."""

    def __init__(self, label: str, peers: Sequence[object]) -> None:
        self.label = label
        self._peers = peers

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        return call_each(self._peers, method, calls)

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def is_here(self) -> bool:
        return True


class WorkerPeers(SyncPeers):
    """Peers that the workers of an engine hold: each worker has a method ``sync_call(method, calls)`` for its own."""

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
        return any(worker.process == process_name(os.getpid()) for worker in self._group.workers)


class TimedPeers(SyncPeers):
    """Adds the seconds of each call to ``seconds``, by its method."""

    def __init__(self, own: SyncPeers, seconds: Counter[str]) -> None:
        self.label = own.label
        self._own = own
        self._seconds = seconds

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        started = time.perf_counter()
        results = self._own.call(method, calls, timeout_s)
        self._seconds[method] += time.perf_counter() - started  # type: ignore[assignment]  # typeshed counts in int
        return results

    def start(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> Callable[[], list[Any]]:
        started = time.perf_counter()
        finish = self._own.start(method, calls, timeout_s)
        self._seconds[method] += time.perf_counter() - started  # type: ignore[assignment]
        return finish

    def __len__(self) -> int:
        return len(self._own)

    @property
    def is_here(self) -> bool:
        return self._own.is_here


class JoinedPeers(SyncPeers):
    """The peers of several engines, in the order of the engines."""

    def __init__(self, parts: Sequence[SyncPeers]) -> None:
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
    def _call(method: str, timeout_s: float, part: SyncPeers, calls: list[Call] | None) -> list[Any]:
        return part.call(method, calls, timeout_s)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def is_here(self) -> bool:
        return any(part.is_here for part in self._parts)


class SpmdPeers(SyncPeers):
    """The peers of all ranks of a world, where every rank drives the same round and has some of the peers."""

    def __init__(self, own: SyncPeers, all_gather: AllGather, rank: int) -> None:
        self.label = own.label
        self._own = own
        self._all_gather = all_gather
        counts: list[int] = [decoded(data, int, "count") for data in all_gather(msgspec.msgpack.encode(len(own)))]
        self._slice = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        self._count = sum(counts)

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        return self.start(method, calls, timeout_s)()

    def start(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> Callable[[], list[Any]]:
        try:
            results = self._own.call(method, None if calls is None else calls[self._slice], timeout_s)
        except Exception as error:  # whatever it is: the other ranks wait for this one
            return partial(self._shared, method, [], error)
        return partial(self._shared, method, results, None)

    def _shared(self, method: str, results: list[Any], error: Exception | None) -> list[Any]:
        """Tell all ranks this one's results or error; returns those of all, or raises the error of one."""
        failure = "" if error is None else str(error) or type(error).__name__
        answers = [
            decoded(data, tuple[str, list[Any]], "answer of a rank")
            for data in self._all_gather(msgspec.msgpack.encode((failure, results)))
        ]
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(answers):
            if text:
                raise SyncError(f"{method}() failed on rank {rank}: {text}")
        return [result for _, own_results in answers for result in own_results]

    def __len__(self) -> int:
        return self._count

    @property
    def is_here(self) -> bool:
        return True


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make all calls at once, the first in the calling thread; returns their results in order.

    Of several errors it raises the one that is nearest to the cause, such as the death of a worker.
    """
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
    """Return how far an error is from the cause: in a collective the others fail because one has."""
    if isinstance(error, WorkerDiedError | WorkerTimeoutError):
        return 0
    return 2 if isinstance(error, CollectiveError) else 1
