"""A weight sync: agree, move, vote, commit.

Until the first byte is written an error leaves the receivers serving what they had. From then until all have committed
they are poisoned: only a complete round, or a reload, ends that. A staged round is not poisoned before its vote.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rlcore.engines.weight_sync.channels.peers import LateError, Parties, TimedParties
from rlcore.engines.weight_sync.endpoint import Place, decoded, is_unwise, refusal
from rlcore.engines.weight_sync.options import Clock, RoundOptions
from rlcore.engines.weight_sync.planning.execution import Summary
from rlcore.engines.weight_sync.planning.manifest import Manifest
from rlcore.engines.weight_sync.transports.routes import PATHS, Direct, Local, Packed, PackedOnHost, Path
from rlcore.errors import DeviceError, RlcoreError, SyncError, UnsupportedError
from rlcore.types import SyncReport

_SLAB_BYTES, _HOST_SLAB_BYTES = 256 << 20, 8 << 20
"""Of each of a sender's two slots; containers often limit a host's shared memory to 64 MiB."""
_SMALLEST_SLAB_BYTES = 1 << 16
_GRACE_S = 10.0
"""For giving up what a failed round holds."""


@dataclass(frozen=True)
class Agreement:
    """What these very senders and receivers know of each other."""

    key: tuple[Any, ...]
    manifest: Manifest
    senders: list[Place]
    receivers: list[Place]
    summaries: list[Summary]

    @property
    def is_proven(self) -> bool:
        return all(summary.is_proven for summary in self.summaries)

    @property
    def digests(self) -> list[str]:
        return [summary.digest for summary in self.summaries]

    @functools.cached_property
    def fallback(self) -> list[int]:
        """Weights that some receiver leaves to its engine's own loader, by their numbers."""
        names = {name for summary in self.summaries for name in summary.fallback}
        return [number for number, weight in enumerate(self.manifest.weights) if weight.name in names]

    def nbytes(self, weights: Sequence[int]) -> int:
        return sum(self.manifest.weights[number].nbytes for number in weights)

    def slab_bytes(self, is_on_host: bool) -> int:
        most = max(self._of_sender(sender) for sender in range(len(self.senders)))
        is_on_host |= any(place.is_host for place in self.senders)
        largest = _HOST_SLAB_BYTES if is_on_host else _SLAB_BYTES
        size = _SMALLEST_SLAB_BYTES
        while size < min(2 * most, largest):
            size *= 2
        return size

    def _of_sender(self, sender: int) -> int:
        return sum(summary.needed_bytes[sender] for summary in self.summaries)


class Rounds:
    """Between the same senders and receivers; what they agreed on and opened is kept from round to round."""

    def __init__(self, senders: Parties, receivers: Parties) -> None:
        self.senders = senders
        self.receivers = receivers
        self.calls_s: Counter[str] = Counter()
        """Of the last round."""
        self.timed = TimedParties(senders, self.calls_s), TimedParties(receivers, self.calls_s)
        self.name = uuid.uuid4().hex
        """By which receivers know these senders from others."""
        self.agreement: Agreement | None = None
        self.paths: dict[type[Path], Path] = {}
        self.kind: type[Path] = Local
        """Of the path that was chosen."""
        self.unshared = ""
        """Why it had to be ``PackedOnHost``, when it was chosen."""
        self.scattered = ""
        """Why it is not ``Direct``, once its memory was seen to move and to be too much to open again."""
        self.last: list[Any] = []
        """What the senders' in-place changes had come to when the receivers were given the weights they have."""

    def run(self, options: RoundOptions, poisoned: Callable[[], AbstractContextManager[None]]) -> SyncReport:
        """One round.

        Args:
            poisoned: entered before the first byte is written, and left without an error when all have committed.

        Raises:
            UnsupportedError: the route that was asked for, or any, cannot be taken; says why.
            SyncError: what went wrong; a note says what the receivers hold.
        """
        self.calls_s.clear()
        round_ = _Round(self, options)
        try:
            return round_.run(poisoned)
        except BaseException as error:
            if round_.is_under_way or not round_.is_agreed:
                self.agreement = None
            if isinstance(error, LateError):
                error = SyncError(f"{error}: the {options.timeout_s:g} s of this round are over")
            self._abandon(str(error) or type(error).__name__)
            raise error

    def _abandon(self, why: str) -> None:
        """Both sides give up what they hold for a round, if they still live; the next one opens its route anew."""
        meeting = "".join(path.meeting for path in self.paths.values())
        self.paths, self.last = {}, []
        for side, told in ((self.receivers, (meeting, why)), (self.senders, (meeting,))):
            with contextlib.suppress(RlcoreError):
                side.call("abandon", [told] * len(side), _GRACE_S)
        if meeting:
            shutil.rmtree(meeting, ignore_errors=True)


class _Round:
    def __init__(self, rounds: Rounds, options: RoundOptions) -> None:
        self._rounds = rounds
        self._senders, self._receivers = rounds.timed
        self._options = options
        self._clock = Clock(options.timeout_s)
        self.is_agreed = False
        self.is_under_way = False
        """Something may have been moved, so that the two sides may be at different steps."""
        self._opened = 0
        self._moved = 0
        self._loaded = 0

    def run(self, poisoned: Callable[[], AbstractContextManager[None]]) -> SyncReport:
        is_same = self._begin()
        self.is_agreed = True
        with ExitStack() as stack:
            if not is_same or self._options.is_verified:
                self._renew(lambda: stack.enter_context(poisoned()))
            else:
                stack.enter_context(poisoned())
            self._all_receivers("commit", self._id, self._options.version)
        self._rounds.last = self._changes
        return SyncReport(
            version=self._options.version,
            route=self._rounds.kind.route,
            why_on_host=self._rounds.unshared if self._rounds.kind is PackedOnHost else "",
            moved_bytes=self._moved,
            needed_bytes=self._needed_bytes if self._moved else 0,
            fallback_bytes=self._loaded,
            handles_opened=self._opened,
            slabs_wait_by=self._slabs_wait_by(),
            calls_s=dict(self._rounds.calls_s),
            seconds=self._clock.seconds,
        )

    def _slabs_wait_by(self) -> str:
        if not self._moved or not issubclass(self._rounds.kind, Packed):
            return ""
        return "event" if self._rounds.paths[self._rounds.kind].is_marked else "host"

    def _renew(self, poison: Callable[[], object]) -> None:
        """All that a round does between agreement and commit."""
        is_staged, is_proven = self._options.is_staged, self._agreed.is_proven
        if is_staged:
            self._check_can_stage()
        self._choose_path()
        self.is_under_way = True
        if not is_staged:
            poison()
        if not is_proven:  # the proof overwrites what is there
            self._prove()
        self._check_votes(self._move())
        if is_staged:
            poison()

    # ---------------------------------------------------------------------------------------------- agree

    def _begin(self) -> bool:
        """Whether the receivers have these very weights."""
        begun = self._all_senders("begin", self._options.is_same)
        places, digests, self._changes, generations, nonces, same = (
            list(column) for column in zip(*begun, strict=True)
        )
        if len(set(digests)) > 1:
            raise SyncError(f"the ranks of {self._senders.label} hold different models: their manifests are {digests}")
        self._generation = sum(generations)
        self._id: int = sum(nonces) % (1 << 62)
        staged = self._options.is_staged
        answers = self._all_receivers("begin", self._id, self._rounds.name, digests[0], self._options.is_same, staged)
        key = (tuple(places), tuple(place for place, _, _ in answers), digests[0])
        is_known = self._rounds.agreement is not None and self._rounds.agreement.key == key
        if not is_known or not all(is_prepared for _, is_prepared, _ in answers):
            self._agree(key)
            return False
        is_told_same = all(same) and all(is_same for *_, is_same in answers)
        return is_told_same and all(self._changes) and self._changes == self._rounds.last

    def _agree(self, key: tuple[Any, ...]) -> None:
        self._rounds.paths, self._rounds.scattered = {}, ""
        senders, receivers, _ = key
        manifest: bytes = self._all_senders("manifest")[0]
        calls = [(self._rounds.name, manifest, list(senders), number) for number in range(len(self._receivers))]
        summaries = self._receivers.call("prepare", calls, self._clock.left())
        self._rounds.agreement = Agreement(
            key,
            decoded(manifest, Manifest, "manifest"),
            [decoded(place, Place, "place") for place in senders],
            [decoded(place, Place, "place") for place in receivers],
            [decoded(summary, Summary, "summary") for summary in summaries],
        )

    @property
    def _agreed(self) -> Agreement:
        assert self._rounds.agreement is not None
        return self._rounds.agreement

    @property
    def _needed_bytes(self) -> int:
        planned = sum(sum(summary.needed_bytes) for summary in self._agreed.summaries)
        return planned + self._loaded

    def _prove(self) -> None:
        summaries = self._all_receivers("prove")
        found = [decoded(summary, Summary, "summary") for summary in summaries]
        self._rounds.agreement = replace(self._agreed, summaries=found)

    def _check_can_stage(self) -> None:
        if fallback := self._agreed.fallback:
            first = self._agreed.manifest.weights[fallback[0]].name
            raise UnsupportedError(
                "staged=True",
                f"{len(fallback)} weights go through the engine's own loader, such as {first!r}, which "
                "writes into the weights that are served",
            )
        if not self._agreed.is_proven:
            raise UnsupportedError(
                "staged=True in the first round to an engine",
                "its plan is proven by loading into the weights that are served; do one round without staged",
            )

    # ---------------------------------------------------------------------------------------------- route

    def _choose_path(self) -> None:
        """Open the route that was asked for, or the first that can be had."""
        reasons: dict[type[Path], str] = {}
        for kind in PATHS:
            if self._options.route not in (None, kind.route):
                continue
            why_not = self._try(kind)
            if not why_not:
                self._rounds.kind = kind
                if kind is PackedOnHost:
                    self._rounds.unshared = reasons[Packed]
                return
            reasons[kind] = why_not
        told = "; ".join(f"{kind.route}{' on the host' * kind.is_on_host}: {why}" for kind, why in reasons.items())
        asked = f"route={self._options.route!r}" if self._options.route else "every route"
        raise UnsupportedError(f"{asked} from {self._senders.label} to {self._receivers.label}", told)

    def _try(self, kind: type[Path]) -> str:
        """Why it cannot be taken, or ""."""
        if kind is Packed and PackedOnHost in self._rounds.paths:  # whose slabs would be given up for another try
            return self._rounds.unshared
        reason = refusal(kind.route, kind.is_on_host, self._agreed.senders, self._agreed.receivers)
        if not reason and self._options.route is None:
            reason = is_unwise(kind.route, self._agreed.senders) or self._rounds.scattered * (kind is Direct)
        if reason:
            return reason
        self._slab_bytes = self._options.slab_bytes or self._agreed.slab_bytes(kind.is_on_host)
        try:
            self._open(kind, self._agreed.digests)
        except (UnsupportedError, DeviceError) as error:
            reason = str(error).partition("\n")[0]
            if self._rounds.paths.pop(kind).is_scattered:
                self._rounds.scattered = reason
        return reason

    def _open(self, kind: type[Path], digests: Sequence[str]) -> Path:
        path = self._rounds.paths.setdefault(kind, kind(self._senders, self._receivers))
        path.is_asked = self._options.route is not None
        self._opened += path.open(digests, self._slab_bytes, self._generation, self._clock.left)
        return path

    # ----------------------------------------------------------------------------------------------- move

    def _move(self) -> list[int]:
        """All that this round moves; what each receiver lacks then."""
        digests, kind = self._agreed.digests, self._rounds.kind
        if not self._agreed.fallback and not self._options.is_verified:
            path = self._open(kind, digests)
            self._moved, missing = path.move_last(self._id, digests, self._options.is_checked, self._clock.left)
            return missing
        self._moved = self._transfer(digests, kind)
        self._load(self._agreed.fallback)
        self._loaded = self._agreed.nbytes(self._agreed.fallback) * len(self._receivers)
        if self._options.is_verified:
            self._verify()
        return self._all_receivers("ready", self._id)

    def _transfer(self, digests: Sequence[str], kind: type[Path]) -> int:
        path = self._open(kind, digests)
        return path.move(self._id, digests, self._options.is_checked, self._clock.left)

    def _load(self, weights: Sequence[int]) -> None:
        """Through the engine's own loader, so many weights at a time as fit into a slab."""
        for group in self._groups(weights):
            computed = [number for number in group if self._agreed.manifest.weights[number].parameter is None]
            digests = self._all_receivers("plan_load", group)
            self._all_senders("compute", computed)
            is_offered = not computed or self._rounds.kind is not Direct  # only parameters are exported
            self._moved += self._transfer(digests, self._rounds.kind if is_offered else Packed)
            self._all_receivers("load", self._id, group)

    def _groups(self, weights: Sequence[int]) -> Iterator[list[int]]:
        group: list[int] = []
        group_bytes = 0
        for number in weights:
            nbytes = self._agreed.nbytes([number])
            if group and group_bytes + nbytes > self._slab_bytes:
                yield group
                group, group_bytes = [], 0
            group.append(number)
            group_bytes += nbytes
        if group:
            yield group

    def _verify(self) -> None:
        """Compare all bytes with what the engine's own loader makes of the same weights."""
        moved = self._moved
        self._all_receivers("remember", self._id)
        self._load(range(len(self._agreed.manifest.weights)))
        self._moved = moved
        for place, wrong in zip(self._agreed.receivers, self._all_receivers("compare", self._id), strict=True):
            if wrong:
                raise SyncError(
                    f"verify=True: {len(wrong)} tensors on {place.device_name} are not what the engine's own loader "
                    f"makes of the same weights, such as {wrong[0]!r}; this is a defect of the plan, please report it"
                )

    # ----------------------------------------------------------------------------------------------- vote

    def _check_votes(self, missing: Sequence[int]) -> None:
        """All have all of it, and it has not changed on the way."""
        for place, count in zip(self._agreed.receivers, missing, strict=True):
            if count:
                raise SyncError(f"{count} buckets did not reach the receiver on {place.device_name}")
        if self._all_senders("end") != self._changes:
            raise SyncError("the trainer's weights were changed while they were sent; sync between two steps")

    def _all_senders(self, method: str, *arguments: Any) -> list[Any]:
        return self._senders.call(method, [arguments] * len(self._senders), self._clock.left())

    def _all_receivers(self, method: str, *arguments: Any) -> list[Any]:
        return self._receivers.call(method, [arguments] * len(self._receivers), self._clock.left())
