"""The weight syncs of a train engine: rounds between its workers and those of inference engines."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from rlcore import spans
from rlcore._torch_private import Store
from rlcore.engines._torch_private import store_of
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.weight_sync.channels.peers import JoinedPeers, SpmdPeers, SyncPeers, WorkerPeers
from rlcore.engines.weight_sync.channels.shared_store import common_stores
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.errors import InvalidInputError, StateError, SyncError, WorkerDiedError, WorkerTimeoutError, first_line
from rlcore.types import SyncReport


class ReceivingEngine(ABC):
    """An engine that takes the weights of a train engine; ``InferenceEngine`` is one.

    What only a weight sync calls is private: a program that poisoned or committed an engine would break its promise
    that the weights are whole.
    """

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """The engine has workers."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of the weights that are served."""

    @property
    @abstractmethod
    def _contents(self) -> object | None:
        """Another object whenever the weights are overwritten; None when there are none."""

    @abstractmethod
    def _receiving_group(self) -> WorkerGroup:
        """Return the workers that take new weights; raises StateError when theirs are not on the device."""

    @abstractmethod
    def _receiving(self, *, is_staged: bool) -> AbstractContextManager[None]:
        """Return what is entered for a round; ``is_staged`` leaves the old weights whole until its end."""

    @abstractmethod
    def _poison(self) -> None:
        """Refuse to serve until ``_commit``: the weights are about to be overwritten."""

    @abstractmethod
    def _commit(self, version: int) -> None:
        """Serve the weights, which are whole and of this version."""


class _KnownSession(NamedTuple):
    """The session with some engines, kept between two rounds."""

    groups: list[WorkerGroup]
    session: SyncSession
    weights: tuple[object, ...]
    """Changes of the trainer and contents of the targets when the last round ended."""


class WeightSync:
    """The sessions of one train engine, by their targets."""

    def __init__(self) -> None:
        self._known: dict[tuple[ReceivingEngine, ...], _KnownSession] = {}
        self._turn = threading.Lock()
        """Is held during a round: all rounds use the same senders, and what these hold for one round."""

    def run(
        self,
        group: WorkerGroup,
        targets: Sequence[ReceivingEngine],
        num_changes: int,
        make_options: Callable[[bool], RoundOptions],
    ) -> SyncReport:
        """Run one round to all targets, who commit together.

        Args:
            group: the trainer's workers.
            num_changes: grows whenever the trainer's weights may have been changed.
            make_options: takes ``RoundOptions.is_same``.

        Raises:
            StateError: a round of this trainer is under way.
        """
        if not self._turn.acquire(blocking=False):
            raise StateError(
                "another thread is syncing this trainer's weights: give all engines to one call of sync_weights(), or "
                "call it for one after the other"
            )
        try:
            key = tuple(targets)
            groups = [group, *(target._receiving_group() for target in targets)]
            known = self._known.get(key)
            options = make_options(known is not None and known.weights == _weights(num_changes, targets))
            if known is None or known.groups != groups:
                self._forget(key)
                known = _KnownSession(groups, _session(groups, options.timeout_s), ())
            self._forget_closed()
            self._known[key] = known
            with spans.call_span("sync_weights", version=options.version) as here, ExitStack() as stack:
                for target in targets:
                    stack.enter_context(target._receiving(is_staged=options.is_staged))
                report = known.session.run(options, lambda: poisoned(targets, options.version))
                here.add({"route": report.route, "bytes": report.moved_bytes, "needed_bytes": report.needed_bytes})
            self._known[key] = known._replace(weights=_weights(num_changes, targets))
            return report
        finally:
            self._turn.release()

    def _forget_closed(self) -> None:
        for key in [key for key in self._known if not all(target.is_built for target in key)]:
            self._forget(key)

    def _forget(self, key: tuple[ReceivingEngine, ...]) -> None:
        """Drop a session. The folder of its process group stays until the workers in the group have ended."""
        if known := self._known.pop(key, None):
            for group in known.groups:
                group.keep_until_end(known.session.stores)

    def close(self) -> None:
        """Drop all sessions, after the trainer's workers have ended."""
        for key in list(self._known):
            self._forget(key)


def _weights(num_changes: int, targets: Sequence[ReceivingEngine]) -> tuple[object, ...]:
    return (num_changes, *(target._contents for target in targets))


def _session(groups: Sequence[WorkerGroup], timeout_s: float) -> SyncSession:
    senders, *receivers = [WorkerPeers(group, timeout_s) for group in groups]
    joined: SyncPeers = receivers[0] if len(receivers) == 1 else JoinedPeers(receivers)
    context = groups[0].workers[0].context
    if not context.joins_torchrun:
        return SyncSession(senders, joined, groups[0].new_rendezvous)

    def all_gather(data: bytes) -> list[bytes]:
        found: list[bytes] = groups[0].call("exchange", [((data,), {})])[0]
        return found

    def common_store() -> Store:
        with context.running("a weight sync"):
            store: Store = store_of(context.process_group(timeout_s))
            return store

    own, others = (SpmdPeers(one, all_gather, context.rank) for one in (senders, joined))
    return SyncSession(own, others, common_stores(all_gather, common_store))


@contextlib.contextmanager
def poisoned(engines: Sequence[ReceivingEngine], version: int) -> Iterator[None]:
    """Inside, and after an error, the engines refuse to generate; a clean end commits ``version`` on all."""
    for engine in engines:
        engine._poison()
    try:
        yield
    except Exception as error:
        is_lost = isinstance(error, WorkerDiedError | WorkerTimeoutError)
        first = "restart() the engine that lost its workers; then " if is_lost else ""
        raise SyncError(
            f"the weight sync to version {version} stopped midway: {first_line(error)}. The inference engine holds "
            f"a mixture and refuses to generate; {first}sync again, or reload with load()"
        ) from error
    for engine in engines:
        engine._commit(version)


def as_targets(given: ReceivingEngine | Sequence[ReceivingEngine]) -> list[ReceivingEngine]:
    """Return the engines that a sync is for; raises InvalidInputError for none, for one twice, or for another thing."""
    targets = list(given) if isinstance(given, list | tuple) else [given]
    are_engines = all(isinstance(target, ReceivingEngine) for target in targets)
    if not targets or not are_engines or len({id(target) for target in targets}) < len(targets):
        raise InvalidInputError(f"sync_weights() takes an inference engine or several different ones, got {given!r}")
    return targets  # type: ignore[return-value]  # mypy does not narrow a Sequence of engines
