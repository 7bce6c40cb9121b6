"""The rounds of a weight sync between the same senders and receivers: agree, move, vote, commit.

Until the first byte is written an error leaves the receivers serving what they had. From then until all have committed
they are poisoned, which only a complete round or a reload ends. In a staged round they are poisoned after the vote.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from rlcore.engines.launchers.runtime_files import StoreFolder
from rlcore.engines.weight_sync.agreement import Agreement, SentRound, why_no_base
from rlcore.engines.weight_sync.channels.peers import LateError, SyncPeers, TimedPeers
from rlcore.engines.weight_sync.endpoint import EndpointInfo, check_versions
from rlcore.engines.weight_sync.messages import PlanSummary, decoded
from rlcore.engines.weight_sync.options import Clock, RoundOptions
from rlcore.engines.weight_sync.planning.manifest import WeightManifest
from rlcore.engines.weight_sync.transports.base import MeetingPlace, Surroundings, Transport
from rlcore.engines.weight_sync.transports.choice import TRANSPORTS, is_unwise, refusal
from rlcore.engines.weight_sync.transports.in_place import DirectTransport, LocalTransport
from rlcore.engines.weight_sync.transports.packed import (
    PackedOnHostTransport,
    PackedTransport,
    SharedSlotsTransport,
    StagingTransport,
)
from rlcore.engines.weight_sync.transports.reach import are_samples_needed
from rlcore.errors import (
    DeviceError,
    RlcoreError,
    SyncError,
    UnsupportedError,
    WorkerDiedError,
    WorkerError,
    first_line,
)
from rlcore.types import SyncReport

_GRACE_S = 10.0
"""Time for both sides to release what a failed round holds."""


class SyncSession:
    """Runs the rounds; what the two sides agreed on and opened is kept from round to round.

    Args:
        senders: all ranks of the trainer.
        receivers: all workers of all engines, which commit together.
        meet: makes a place where they can find each other to form a process group; None: a folder of this user.
    """

    def __init__(
        self, senders: SyncPeers, receivers: SyncPeers, meet: Callable[[], MeetingPlace] | None = None
    ) -> None:
        self.senders = senders
        self.receivers = receivers
        self.meet: Callable[[], MeetingPlace] = StoreFolder if meet is None else meet
        self.meets_anywhere = meet is not None
        self.calls_s: Counter[str] = Counter()
        """Seconds of each call of the last round, by its method."""
        self.timed = TimedPeers(senders, self.calls_s), TimedPeers(receivers, self.calls_s)
        self.name = uuid.uuid4().hex
        """The name by which receivers tell these senders from others."""
        self.agreement: Agreement | None = None
        self.transports: dict[type[Transport], Transport] = {}
        self.kind: type[Transport] = LocalTransport
        """The kind of transport that was chosen last."""
        self.unshared = ""
        """The reason why it had to be ``PackedOnHostTransport``, when that was chosen."""
        self.scattered = ""
        """The reason why it is not ``DirectTransport``: memory has moved, and is too much to open again; or ""."""
        self.sent: SentRound | None = None
        """The last round, if it was one with ``delta=True``."""
        self.last: list[Any] = []
        """The changes that senders reported (``Sender.begin``) when the receivers got their present weights."""

    def run(self, options: RoundOptions, poisoned: Callable[[], AbstractContextManager[None]]) -> SyncReport:
        """Run one round.

        Args:
            poisoned: entered before the first byte is written, and left without an error when all have committed.

        Raises:
            UnsupportedError: the route that was asked for, or any, cannot be taken; says why.
            SyncError: what went wrong; a note says what the receivers hold.
        """
        self.calls_s.clear()
        for transport in self.transports.values():
            transport.sent_bytes.clear()
        round_ = _Round(self, options)
        try:
            return round_.run(poisoned)
        except BaseException as error:
            if round_.is_under_way or not round_.is_agreed:
                self.agreement = None
            if isinstance(error, LateError):
                error = SyncError(f"{error}: the {options.timeout_s:g} s of this round are over")
            died = self._abandon(str(error) or type(error).__name__)
            if died is not None and isinstance(error, RlcoreError) and not isinstance(error, WorkerError):
                raise died from error  # memory that a process shared goes with it, which another may see first
            raise error

    @property
    def stores(self) -> list[MeetingPlace]:
        """The meeting place of the process group, if there is one."""
        return [one.store for one in self.transports.values() if one.store is not None]

    def close(self) -> None:
        """Forget the transports, after one side has closed what it had opened for them, and has left their group."""
        for store in self.stores:
            store.remove()
        self.transports = {}

    def _abandon(self, why: str) -> WorkerDiedError | None:
        """Have both sides release what they hold for a round, if they live; the next one opens its transport anew.

        Returns:
            The error of the first worker that has died.
        """
        stores = self.stores
        rendezvous = "".join(store.path for store in stores)
        self.transports, self.sent, self.last = {}, None, []
        died: WorkerDiedError | None = None
        for side, arguments in ((self.receivers, (rendezvous, why)), (self.senders, (rendezvous,))):
            try:
                side.call("abandon", [arguments] * len(side), _GRACE_S)
            except WorkerDiedError as error:
                died = died or error
            except RlcoreError:
                continue
        for store in stores:
            store.remove()
        return died


class _Round:
    """One round of a session."""

    def __init__(self, session: SyncSession, options: RoundOptions) -> None:
        self._session = session
        self._senders, self._receivers = session.timed
        self._options = options
        self._clock = Clock(options.timeout_s)
        self.is_agreed = False
        self.is_under_way = False
        """Something may have been moved, so that the two sides may be at different steps."""
        self._num_opened = 0
        self._moved = 0
        self._loaded = 0
        self._is_delta = False
        self._why_dense = ""

    def run(self, poisoned: Callable[[], AbstractContextManager[None]]) -> SyncReport:
        has_moved = not self._begin(self._options.is_same and not self._options.is_verified)
        self.is_agreed = True
        with ExitStack() as stack:
            if has_moved:
                self._renew(lambda: stack.enter_context(poisoned()))
            else:
                stack.enter_context(poisoned())
            self._all_receivers("commit", self._id, self._options.version, has_moved)
            if has_moved:
                self._session.sent = self._sent()
        self._session.last = self._changes
        return SyncReport(
            version=self._options.version,
            route=self._session.kind.route,
            why_on_host=self._session.unshared if self._session.kind is PackedOnHostTransport else "",
            moved_bytes=self._moved,
            needed_bytes=self._needed_bytes if self._moved else 0,
            network_bytes=self._network_bytes,
            fallback_bytes=self._loaded,
            handles_opened=self._num_opened,
            staging_waits_by=self._staging_waits_by(),
            is_delta=self._is_delta,
            why_dense=self._why_dense,
            calls_s=dict(self._session.calls_s),
            seconds=self._clock.seconds,
        )

    def _staging_waits_by(self) -> str:
        """Return ``SyncReport.staging_waits_by``."""
        if not self._moved or not issubclass(self._session.kind, SharedSlotsTransport):
            return ""
        return "event" if self._session.transports[self._session.kind].waits_by_event else "host"

    def _renew(self, poison: Callable[[], object]) -> None:
        """Do all that a round does between agreement and commit."""
        is_staged, is_tested = self._options.is_staged, self._agreed.is_tested
        if is_staged:
            self._check_can_stage()
        self._choose_transport()
        self.is_under_way = True
        if not is_staged:
            poison()
        if not is_tested:  # the test overwrites what is there
            self._test_plans()
        self._check_votes(self._move())
        if is_staged:
            poison()

    # ---------------------------------------------------------------------------------------------- agree

    def _begin(self, is_same: bool) -> bool:
        """Return True if nothing has to be moved: the receivers have the senders' present weights already."""
        begun = self._all_senders("begin", is_same)
        infos, digests, self._changes, generations, nonces, same = (list(column) for column in zip(*begun, strict=True))
        if len(set(digests)) > 1:
            raise SyncError(f"the ranks of {self._senders.label} hold different models: their manifests are {digests}")
        self._generation = sum(generations)
        self._id: int = sum(nonces) % (1 << 62)
        staged = self._options.is_staged
        answers = self._all_receivers("begin", self._id, self._session.name, digests[0], is_same, staged)
        key = (tuple(infos), tuple(one for one, *_ in answers), digests[0])
        self._held: list[int] = [held for *_, held in answers]
        is_known = self._session.agreement is not None and self._session.agreement.key == key
        if not is_known or not all(is_prepared for _, is_prepared, *_ in answers):
            self._agree(key)
            have_same = False
        else:
            are_told_same = all(same) and all(told for *_, told, _ in answers)
            have_same = are_told_same and all(self._changes) and self._changes == self._session.last
        # A sender that was told so has not looked at what its module has now.
        return self._begin(False) if any(same) and not have_same else have_same

    def _agree(self, key: tuple[Any, ...]) -> None:
        for transport in self._session.transports.values():
            transport.close(self._clock.left)
        self._session.transports, self._session.scattered, self._session.sent = {}, "", None
        senders, receivers = ([decoded(one, EndpointInfo, "endpoint info") for one in ends] for ends in key[:2])
        check_versions([*senders, *receivers])
        manifest: bytes = self._all_senders("manifest")[0]
        samples = self._all_senders("show_sample") if are_samples_needed(senders, receivers) else None
        common = [self._session.name, manifest, list(key[0])]
        calls = [(*common, turn, samples) for turn in _turns(senders, receivers)]
        summaries = self._receivers.call("prepare", calls, self._clock.left())
        if samples is not None:
            self._all_senders("hide_sample")
        self._session.agreement = Agreement(
            key,
            decoded(manifest, WeightManifest, "manifest"),
            senders,
            receivers,
            [decoded(summary, PlanSummary, "summary") for summary in summaries],
        )

    @property
    def _agreed(self) -> Agreement:
        assert self._session.agreement is not None
        return self._session.agreement

    @property
    def _needed_bytes(self) -> int:
        planned = sum(sum(summary.needed_bytes) for summary in self._agreed.summaries)
        return planned + self._loaded

    @property
    def _network_bytes(self) -> int:
        """The bytes of weights that went from one machine to another in this round."""
        sent = sum((one.sent_bytes for one in self._session.transports.values()), Counter[tuple[int, int]]())
        machines = self._around.machines
        return sum(nbytes for (of, to), nbytes in sent.items() if machines[of] != machines[to])

    @property
    def _around(self) -> Surroundings:
        ends = [*self._agreed.senders, *self._agreed.receivers]
        machines, kinds = [one.machine for one in ends], {one.device for one in ends}
        reached = [summary.are_reached for summary in self._agreed.summaries]
        return Surroundings(machines, kinds, reached, self._session.name)

    def _test_plans(self) -> None:
        summaries = self._all_receivers("self_test")
        found = [decoded(summary, PlanSummary, "summary") for summary in summaries]
        self._session.agreement = replace(self._agreed, summaries=found)

    def _check_can_stage(self) -> None:
        if fallback := self._agreed.fallback:
            first = self._agreed.manifest.weights[fallback[0]].name
            raise UnsupportedError(
                "staged=True",
                f"{len(fallback)} weights go through the engine's own loader, such as {first!r}, which "
                "writes into the weights that are served",
            )
        if not self._agreed.is_tested:
            raise UnsupportedError(
                "staged=True in the first round to an engine",
                "its plan is tested by loading into the weights that are served; do one round without staged",
            )

    # ---------------------------------------------------------------------------------------------- route

    def _choose_transport(self) -> None:
        """Open the transport of the route that was asked for, or the first that can be had."""
        reasons: dict[type[Transport], str] = {}
        for kind in TRANSPORTS:
            if self._options.route not in (None, kind.route):
                continue
            why_not = self._try(kind)
            if not why_not:
                self._session.kind = kind
                if kind is PackedOnHostTransport:
                    self._session.unshared = reasons[PackedTransport]
                return
            reasons[kind] = why_not
        refusals = "; ".join(f"{kind.route}{' on the host' * kind.is_on_host}: {why}" for kind, why in reasons.items())
        asked = f"route={self._options.route!r}" if self._options.route else "every route"
        raise UnsupportedError(f"{asked} from {self._senders.label} to {self._receivers.label}", refusals)

    def _try(self, kind: type[Transport]) -> str:
        """Open a transport; returns why it cannot be taken, or ""."""
        if kind is PackedTransport and PackedOnHostTransport in self._session.transports:
            # Another try would drop the staging buffers on the host.
            return self._session.unshared
        reason = refusal(
            kind.route,
            kind.is_on_host,
            self._agreed.senders,
            self._agreed.receivers,
            [summary.unreached for summary in self._agreed.summaries],
            reached=self._around.reached,
            meets_anywhere=self._session.meets_anywhere,
        )
        if not reason and self._options.route is None:
            reason = is_unwise(kind.route, self._agreed.senders) or self._session.scattered * (kind is DirectTransport)
        if reason:
            return reason
        self._staging_bytes = self._options.staging_bytes or self._agreed.staging_bytes(kind.is_on_host)
        try:
            self._open(kind, self._agreed.digests)
        except (UnsupportedError, DeviceError) as error:
            reason = first_line(error)
            failed = self._session.transports.pop(kind)
            if failed.is_scattered:
                self._session.scattered = reason
            failed.close(self._clock.left)  # it may have formed a group
        return reason

    def _open(self, kind: type[Transport], digests: Sequence[str]) -> Transport:
        known = self._session.transports
        transport = known.setdefault(kind, kind(self._senders, self._receivers, self._session.meet, self._around))
        transport.is_asked = self._options.route is not None
        self._num_opened += transport.open(digests, self._staging_bytes, self._generation, self._clock.left)
        return transport

    # ---------------------------------------------------------------------------------------------- delta

    def _choose_base(self, transport: Transport) -> None:
        """Have the senders tell changes alone, where that was asked for and all have the same base."""
        if not (self._options.is_delta and isinstance(transport, StagingTransport)):
            for one in self._session.transports.values():  # of an earlier round, perhaps by another route
                if isinstance(one, StagingTransport) and one.is_keeping:
                    one.keep([], self._clock.left)
            if self._options.is_delta:
                self._why_dense = f"{transport.route!r} copies from the trainer's own tensors, and sends nothing"
            return
        kept: Sequence[int | None] = ()
        self._why_dense = self._agreed.why_unreadable
        if not self._why_dense:
            kept, self._why_dense = transport.keep(self._agreed.digests, self._clock.left)
        if self._why_dense:
            transport.keep([], self._clock.left)
            return
        base = self._session.sent
        self._why_dense = why_no_base(base, self._as_sent(), kept, self._agreed, self._held)
        if base is not None and not self._why_dense:
            transport.tell_changes(base.round_id)
            self._is_delta = True

    def _sent(self) -> SentRound | None:
        """Return what the next round's changes may be told against, after this one's commit."""
        transport = self._session.transports[self._session.kind]
        if not isinstance(transport, StagingTransport) or not transport.is_keeping:
            return None
        return self._as_sent()

    def _as_sent(self) -> SentRound:
        return SentRound(self._id, self._options.version, self._session.kind, self._agreed.digests, self._staging_bytes)

    # ----------------------------------------------------------------------------------------------- move

    def _move(self) -> list[int]:
        """Move all that this round moves; returns what each receiver lacks then."""
        digests, kind = self._agreed.digests, self._session.kind
        transport = self._open(kind, digests)
        self._choose_base(transport)
        if not self._agreed.fallback and not self._options.is_verified:
            self._moved, missing = transport.move_last(self._id, digests, self._options.is_checked, self._clock.left)
            return missing
        self._moved = transport.move(self._id, digests, self._options.is_checked, self._clock.left)
        self._load(self._agreed.fallback)
        self._loaded = self._agreed.nbytes(self._agreed.fallback) * len(self._receivers)
        if self._options.is_verified:
            self._verify()
        return self._all_receivers("ready", self._id)

    def _transfer(self, digests: Sequence[str], kind: type[Transport]) -> int:
        transport = self._open(kind, digests)
        return transport.move(self._id, digests, self._options.is_checked, self._clock.left)

    def _load(self, weights: Sequence[int]) -> None:
        """Have the engine's own loader load weights, as many at a time as fit into a staging buffer."""
        for group in self._groups(weights):
            computed = [number for number in group if self._agreed.manifest.weights[number].parameter is None]
            digests = self._all_receivers("plan_load", group)
            self._all_senders("compute", computed)
            is_offered = not computed or self._session.kind is not DirectTransport  # only parameters are exported
            self._moved += self._transfer(digests, self._session.kind if is_offered else PackedTransport)
            self._all_receivers("load", self._id, group)

    def _groups(self, weights: Sequence[int]) -> Iterator[list[int]]:
        group: list[int] = []
        group_bytes = 0
        for number in weights:
            nbytes = self._agreed.nbytes([number])
            if group and group_bytes + nbytes > self._staging_bytes:
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
        for one, wrong in zip(self._agreed.receivers, self._all_receivers("compare", self._id), strict=True):
            if wrong:
                raise SyncError(
                    f"verify=True: {len(wrong)} tensors on {one.device_name} are not what the engine's own loader "
                    f"makes of the same weights, such as {wrong[0]!r}; this is a defect of the plan, please report it"
                )

    # ----------------------------------------------------------------------------------------------- vote

    def _check_votes(self, missing: Sequence[int]) -> None:
        """Raise SyncError unless all receivers have all of it, and it has not changed on the way."""
        for one, count in zip(self._agreed.receivers, missing, strict=True):
            if count:
                raise SyncError(f"{count} buckets did not reach the receiver on {one.device_name}")
        if self._all_senders("end") != self._changes:
            raise SyncError("the trainer's weights were changed while they were sent; sync between two steps")

    def _all_senders(self, method: str, *arguments: Any) -> list[Any]:
        return self._senders.call(method, [arguments] * len(self._senders), self._clock.left())

    def _all_receivers(self, method: str, *arguments: Any) -> list[Any]:
        return self._receivers.call(method, [arguments] * len(self._receivers), self._clock.left())


def _turns(senders: Sequence[EndpointInfo], receivers: Sequence[EndpointInfo]) -> list[int]:
    """Return the number by which each receiver chooses among replicas of the trainer that are equally near.

    Those of one machine without a trainer rank choose alike: what they want alike crosses the network once.
    """
    here = {one.machine for one in senders}
    far = list(dict.fromkeys(one.machine for one in receivers if one.machine not in here))
    return [number if one.machine in here else far.index(one.machine) for number, one in enumerate(receivers)]
