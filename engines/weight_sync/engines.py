"""The weight syncs of a train engine: rounds between its workers and those of inference engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from rlcore.engines.inference import InferenceEngine, poisoned
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.weight_sync.channels.peers import JoinedParties, Parties, SpmdParties, WorkerParties
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.session import Rounds
from rlcore.errors import InvalidInputError
from rlcore.types import SyncReport


class _Known(NamedTuple):
    """What is kept between two rounds with the same engines."""

    groups: list[WorkerGroup]
    rounds: Rounds
    weights: tuple[object, ...]
    """Changes of the trainer and contents of the targets when the last round ended."""


class WeightSync:
    """Of one train engine."""

    def __init__(self) -> None:
        self._known: dict[tuple[InferenceEngine, ...], _Known] = {}

    def run(
        self,
        group: WorkerGroup,
        targets: Sequence[InferenceEngine],
        num_changes: int,
        make_options: Callable[[bool], RoundOptions],
    ) -> SyncReport:
        """One round to all targets, who commit together.

        Args:
            group: the trainer's workers.
            num_changes: grows whenever the trainer's weights may have been changed.
            make_options: takes ``RoundOptions.is_same``.
        """
        key = tuple(targets)
        groups = [group, *(target.receiving_group() for target in targets)]
        known = self._known.get(key)
        options = make_options(known is not None and known.weights == _weights(num_changes, targets))
        if known is None or known.groups != groups:
            known = _Known(groups, _rounds(groups, options.timeout_s), ())
        self._forget_closed()
        self._known[key] = known
        with ExitStack() as stack:
            for target in targets:
                stack.enter_context(target.receiving(is_staged=options.is_staged))
            report = known.rounds.run(options, lambda: poisoned(targets, options.version))
        self._known[key] = known._replace(weights=_weights(num_changes, targets))
        return report

    def _forget_closed(self) -> None:
        for key in [key for key in self._known if not all(target.is_built for target in key)]:
            del self._known[key]


def _weights(num_changes: int, targets: Sequence[InferenceEngine]) -> tuple[object, ...]:
    return (num_changes, *(target.contents for target in targets))


def _rounds(groups: Sequence[WorkerGroup], timeout_s: float) -> Rounds:
    senders, *receivers = [WorkerParties(group, timeout_s) for group in groups]
    joined: Parties = receivers[0] if len(receivers) == 1 else JoinedParties(receivers)
    context = groups[0].workers[0].context
    if not context.joins_torchrun:
        return Rounds(senders, joined)

    def exchange(data: bytes) -> list[bytes]:
        found: list[bytes] = groups[0].call("exchange", [((data,), {})])[0]
        return found

    return Rounds(SpmdParties(senders, exchange, context.rank), SpmdParties(joined, exchange, context.rank))


def as_targets(given: InferenceEngine | Sequence[InferenceEngine]) -> list[InferenceEngine]:
    """The engines that a sync is for; each once."""
    targets = list(given) if isinstance(given, list | tuple) else [given]
    are_engines = all(isinstance(target, InferenceEngine) for target in targets)
    if not targets or not are_engines or len({id(target) for target in targets}) < len(targets):
        raise InvalidInputError(f"sync_weights() takes an inference engine or several different ones, got {given!r}")
    return targets  # type: ignore[return-value]  # mypy does not narrow a Sequence of engines
