"""Senders pack buckets into staging buffers: shared memory of their devices, or of the host, that receivers open."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from rlcore.engines.weight_sync.channels.peers import SyncPeers, at_once
from rlcore.engines.weight_sync.messages import Packing, Relaying
from rlcore.engines.weight_sync.transports.base import PATIENCE, MeetingPlace, Surroundings, TimeLeft, Transport

encode = msgspec.msgpack.encode


class StagingTransport(Transport):
    """Each sender packs the buckets of all distinct plans into its staging buffers, one plan after the other."""

    def __init__(
        self, senders: SyncPeers, receivers: SyncPeers, meet: Callable[[], MeetingPlace], around: Surroundings
    ) -> None:
        super().__init__(senders, receivers, meet, around)
        self._counts: dict[str, list[int]] = {}
        """For each plan how many buckets each sender packs."""
        self._slot_bytes = 0
        self._kept: frozenset[str] = frozenset()
        self._base = 0

    def open(self, digests: Sequence[str], slot_bytes: int, generation: int, left: TimeLeft) -> int:
        if slot_bytes != self._slot_bytes:
            self._counts, self._slot_bytes = {}, slot_bytes
        num_opened = self._connect(slot_bytes, left)
        for digest in dict.fromkeys(digests):
            if digest not in self._counts:
                self._counts[digest] = self._give_plan(digest, digests, slot_bytes, left)
        return num_opened

    def keep(self, digests: Sequence[str], left: TimeLeft) -> tuple[list[int | None], str]:
        """Have senders keep a copy of all that these plans send from now on; with none, give up what they have.

        Returns:
            The round of which each sender has copies already, 0 for none, None where it sends nothing; and the reason
            why some cannot, or "".
        """
        self._kept, self._base = frozenset(digests), 0
        found = self._senders.call("keep_sent", [(sorted(self._kept), self._slot_bytes)] * len(self._senders), left())
        rounds, reasons = zip(*found, strict=True)
        return list(rounds), next(filter(None, reasons), "")

    def tell_changes(self, base: int) -> None:
        """Tell what the plans of ``keep`` send as changes since round ``base``, which senders and receivers have."""
        self._base = base

    @property
    def is_keeping(self) -> bool:
        """Senders keep copies of what they send."""
        return bool(self._kept)

    @abstractmethod
    def _connect(self, slot_bytes: int, left: TimeLeft) -> int:
        """Connect the two sides; returns how many handles were opened."""

    def _give_plan(self, digest: str, digests: Sequence[str], slot_bytes: int, left: TimeLeft) -> list[int]:
        """Have one of the receivers with a plan give it to the senders; returns how many buckets each will pack."""
        author = digests.index(digest)
        asked = [(digest,) if number == author else (None,) for number in range(len(digests))]
        pieces: list[bytes] = self._receivers.call("pieces", asked, left())[author]
        return self._senders.call("take_plan", [(digest, slot_bytes, own) for own in pieces], left())

    def _steps(
        self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool]
    ) -> list[list[Packing | None]]:
        """Return for each step the bucket that each sender packs, None where it has no more."""
        distinct = list(dict.fromkeys(digests))
        sequences = [
            [(digest, bucket) for digest in distinct for bucket in range(self._counts[digest][sender])]
            for sender in range(len(self._senders))
        ]
        return [
            [
                one and self._packing(round_id, *one, sender=sender, step=step, is_checked=is_checked(step))
                for sender, one in enumerate(row)
            ]
            for step, row in enumerate(zip_longest(*sequences))
        ]

    def _packing(self, round_id: int, digest: str, bucket: int, *, sender: int, step: int, is_checked: bool) -> Packing:
        return Packing(
            round_id=round_id,
            digest=digest,
            slot_bytes=self._slot_bytes,
            bucket=bucket,
            slot=step % 2,
            is_checked=is_checked,
            is_kept=digest in self._kept,
            base=self._base if digest in self._kept else 0,
            waits_by_event=self.waits_by_event,
            session=self._around.session,
            sender=sender,
            holder=sender,
        )


class SlotStep(NamedTuple):
    """One slot of every sender is filled, and unpacked then."""

    fillings: Sequence[Packing | Relaying | None]
    """For each sender what it does to fill its slot; None: nothing."""
    unpackings: list[list[Packing]]
    """For each receiver what it unpacks then."""


class SharedSlotsTransport(StagingTransport):
    """Receivers open the senders' staging buffers; one buffer is unpacked while the other is filled."""

    def __init__(
        self, senders: SyncPeers, receivers: SyncPeers, meet: Callable[[], MeetingPlace], around: Surroundings
    ) -> None:
        super().__init__(senders, receivers, meet, around)
        self._handles: list[bytes] = []

    def _connect(self, slot_bytes: int, left: TimeLeft) -> int:
        asked = [(slot_bytes, self.is_on_host)] * len(self._senders)
        handles = self._senders.call("open_staging_buffers", asked, left())
        if handles == self._handles:
            return 0
        self._handles = []
        calls = [(handles, PATIENCE * left())] * len(self._receivers)
        num_opened: int = sum(self._receivers.call("open_staging_buffers", calls, left()))
        self.waits_by_event = not self.is_on_host and self._exchange_events(left)
        self._handles = handles
        return num_opened

    def _exchange_events(self, left: TimeLeft) -> bool:
        """Give each side the other's events; returns True if every device can wait for every other."""
        session = self._around.session
        of_senders = self._senders.call("open_events", [(session,)] * len(self._senders), left())
        if not all(handles for _, handles in of_senders):
            return False
        of_receivers = self._receivers.call("open_events", [(of_senders,)] * len(self._receivers), left())
        return all(self._senders.call("import_events", [(session, of_receivers)] * len(self._senders), left()))

    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: TimeLeft) -> int:
        steps = self._schedule(round_id, digests, is_checked)
        moved = 0
        for filling, full in zip([*steps, None], [None, *steps], strict=True):
            moved += self._step(filling, full, left)
        return moved

    @abstractmethod
    def _schedule(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool]) -> list[SlotStep]:
        """Return what happens to the slots, step after step."""

    @abstractmethod
    def _fill(self, step: SlotStep, left: TimeLeft) -> None:
        """Have each sender fill a slot."""

    def _step(self, filling: SlotStep | None, full: SlotStep | None, left: TimeLeft) -> int:
        """Fill one slot of each sender while the slots of the step before are unpacked; returns the bytes unpacked."""

        def pack() -> None:
            if filling is not None:
                self._fill(filling, left)

        def unpack() -> int:
            if full is None:
                return 0
            return sum(self._receivers.call("unpack", [(encode(own),) for own in full.unpackings], left()))

        if filling is None or full is None or (self._senders.is_here and self._receivers.is_here):
            pack()
            return unpack()
        if self._senders.is_here:  # the calling thread is theirs
            return int(at_once([pack, unpack])[1])
        return int(at_once([unpack, pack])[0])


class PackedTransport(SharedSlotsTransport):
    """Each sender packs its own buckets, and every receiver opens the staging buffers of all that it needs."""

    route = "packed"

    def _schedule(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool]) -> list[SlotStep]:
        return [
            SlotStep(row, [[one for one in row if one is not None and one.digest == digest] for digest in digests])
            for row in self._steps(round_id, digests, is_checked)
        ]

    def _fill(self, step: SlotStep, left: TimeLeft) -> None:
        self._senders.call("pack", [(one and encode(one),) for one in step.fillings], left())


class PackedOnHostTransport(PackedTransport):
    """The staging buffers are in the host's memory.

    Each sender copies to them from its device, and each receiver copies from them to its own.
    """

    is_on_host = True
