"""How bytes get from senders to receivers: by what is opened before, and which calls move one plan.

All calls go to all senders or all receivers at once and carry plain data.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ClassVar

import msgspec

from rlcore.engines.launchers.runtime_files import new_store
from rlcore.engines.weight_sync.channels.peers import Parties, at_once
from rlcore.engines.weight_sync.endpoint import Route
from rlcore.engines.weight_sync.sender import Packing, Sending
from rlcore.errors import UnsupportedError

_encode = msgspec.msgpack.encode
_PATIENCE = 0.7
"""Of the time left, how long one waits for another's answer: it says so before its own caller ends it."""
MOST_HANDLES = 32
"""That a receiver opens of a sender each time that the sender's memory has moved: slabs stay open instead, unless there
are many bytes for each."""
MANY_BYTES = 1 << 28
"""Through slabs they take about 3 ms longer, and a handle is opened in half a millisecond (``bench/results``, H200)."""
Left = Callable[[], float]
"""Seconds until the round's deadline; raises SyncError after it."""


class Path(ABC):
    """One route between these senders and receivers; what it has opened stays open for the next round."""

    route: ClassVar[Route]
    is_on_host: ClassVar[bool] = False
    """Through shared memory of the host, because others cannot open the devices' own."""

    is_asked = False
    """For by the caller, who knows why: it is taken even where another would be quicker."""
    is_scattered = False
    """There is too much to open each time."""
    is_marked = False
    """Devices wait for each other, and not each process for its own."""
    meeting = ""
    """The folder of the group that it has formed."""

    def __init__(self, senders: Parties, receivers: Parties) -> None:
        self._senders = senders
        self._receivers = receivers

    @abstractmethod
    def open(self, digests: Sequence[str], slot_bytes: int, generation: int, left: Left) -> int:
        """Make ready to move the plan ``digests[r]`` to each receiver r; the handles opened for it.

        Args:
            slot_bytes: of a slab.
            generation: another one when the senders' memory may have moved.

        Raises:
            UnsupportedError, DeviceError: it cannot be had here; says why. Nothing has been written.
        """

    @abstractmethod
    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: Left) -> int:
        """Move one plan to each receiver; the bytes that all of them took.

        Args:
            is_checked: of a step: whether its buckets carry checksums.
        """

    def move_last(
        self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: Left
    ) -> tuple[int, list[int]]:
        """``move``, after which nothing else comes in this round; and what each receiver lacks (``Receiver.ready``)."""
        moved = self.move(round_id, digests, is_checked, left)
        return moved, self._receivers.call("ready", [(round_id,)] * len(self._receivers), left())


class InPlace(Path):
    """Receivers read the senders' own tensors."""

    def __init__(self, senders: Parties, receivers: Parties) -> None:
        super().__init__(senders, receivers)
        self._generation = -1
        self._was_open = False

    def open(self, digests: Sequence[str], slot_bytes: int, generation: int, left: Left) -> int:
        if generation == self._generation:
            return 0
        self._generation = -1
        found = self._senders.call("offer", [(self.is_shared,)] * len(self._senders), left())
        offers = [one[0] for one in found]
        for _, num_handles, nbytes in found:
            self._check_reopening(num_handles, nbytes)
        calls = [(offers, _PATIENCE * left())] * len(self._receivers)
        opened = self._receivers.call("open_offers", calls, left())
        self._generation, self._was_open = generation, True
        return sum(opened)

    def _check_reopening(self, num_handles: int, nbytes: int) -> None:
        """The first opening may take its time, where nothing moves after that."""
        most = max(MOST_HANDLES, nbytes // MANY_BYTES)
        self.is_scattered = self._was_open and not self.is_asked and num_handles > most
        if self.is_scattered:
            raise UnsupportedError(
                "opening the trainer's weights again each time that they were offloaded",
                f"they lie in {num_handles} blocks of memory, of which {most} would be few; slabs stay open",
            )

    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: Left) -> int:
        return sum(moved for (moved,) in self._pull(round_id, digests, left, is_last=False))

    def move_last(
        self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: Left
    ) -> tuple[int, list[int]]:
        moved, missing = zip(*self._pull(round_id, digests, left, is_last=True), strict=True)
        return sum(moved), list(missing)

    def _pull(self, round_id: int, digests: Sequence[str], left: Left, *, is_last: bool) -> list[list[int]]:
        """In one call with the vote: each costs a round trip."""
        return self._receivers.call("pull", [(round_id, digest, is_last) for digest in digests], left())

    @property
    def is_shared(self) -> bool:
        return self.route == "direct"


class Local(InPlace):
    """In one process."""

    route = "local"


class Direct(InPlace):
    """Through shared memory of the senders' devices."""

    route = "direct"


class Bucketed(Path):
    """Through buckets: the sequence that each sender fills is that of the distinct plans, one after the other."""

    def __init__(self, senders: Parties, receivers: Parties) -> None:
        super().__init__(senders, receivers)
        self._counts: dict[str, list[int]] = {}
        self._slot_bytes = 0

    def open(self, digests: Sequence[str], slot_bytes: int, generation: int, left: Left) -> int:
        if slot_bytes != self._slot_bytes:
            self._counts, self._slot_bytes = {}, slot_bytes
        opened = self._connect(slot_bytes, left)
        for digest in dict.fromkeys(digests):
            if digest not in self._counts:
                self._counts[digest] = self._give_plan(digest, digests, slot_bytes, left)
        return opened

    @abstractmethod
    def _connect(self, slot_bytes: int, left: Left) -> int:
        """The handles opened."""

    def _give_plan(self, digest: str, digests: Sequence[str], slot_bytes: int, left: Left) -> list[int]:
        """One of the receivers that have a plan gives it to the senders; how many buckets each of these will fill."""
        author = digests.index(digest)
        asked = [(digest,) if number == author else (None,) for number in range(len(digests))]
        pieces: list[bytes] = self._receivers.call("pieces", asked, left())[author]
        return self._senders.call("take_plan", [(digest, slot_bytes, own) for own in pieces], left())

    def _steps(
        self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool]
    ) -> list[list[Packing | None]]:
        """For each step what each sender packs, None where it has no more."""
        distinct = list(dict.fromkeys(digests))
        sequences = [
            [(digest, bucket) for digest in distinct for bucket in range(self._counts[digest][sender])]
            for sender in range(len(self._senders))
        ]
        return [
            [
                one
                and Packing(
                    round_id=round_id,
                    digest=one[0],
                    slot_bytes=self._slot_bytes,
                    bucket=one[1],
                    slot=step % 2,
                    is_checked=is_checked(step),
                    is_marked=self.is_marked,
                    sender=sender,
                )
                for sender, one in enumerate(row)
            ]
            for step, row in enumerate(zip_longest(*sequences))
        ]


class Packed(Bucketed):
    """Through slabs of the senders that receivers have opened; one is emptied while the other is filled."""

    route = "packed"

    def __init__(self, senders: Parties, receivers: Parties) -> None:
        super().__init__(senders, receivers)
        self._handles: list[bytes] = []

    def _connect(self, slot_bytes: int, left: Left) -> int:
        asked = [(slot_bytes, self.is_on_host)] * len(self._senders)
        handles = self._senders.call("open_slabs", asked, left())
        if handles == self._handles:
            return 0
        self._handles = []
        calls = [(handles, _PATIENCE * left())] * len(self._receivers)
        opened: int = sum(self._receivers.call("open_slabs", calls, left()))
        self.is_marked = not self.is_on_host and self._open_marks(left)
        self._handles = handles
        return opened

    def _open_marks(self, left: Left) -> bool:
        """Whether all can wait for all."""
        of_senders = self._senders.call("open_marks", None, left())
        if not all(handles for _, handles in of_senders):
            return False
        of_receivers = self._receivers.call("open_marks", [(of_senders,)] * len(self._receivers), left())
        return all(self._senders.call("know_marks", [(of_receivers,)] * len(self._senders), left()))

    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: Left) -> int:
        steps = self._steps(round_id, digests, is_checked)
        moved = 0
        for filling, full in zip([*steps, None], [None, *steps], strict=True):
            moved += self._step(filling, full, digests, left)
        return moved

    def _step(
        self,
        filling: list[Packing | None] | None,
        full: list[Packing | None] | None,
        digests: Sequence[str],
        left: Left,
    ) -> int:
        """Fill slots while those of the step before are emptied."""

        def pack() -> None:
            if filling is not None:
                self._senders.call("pack", [(one and _encode(one),) for one in filling], left())

        def unpack() -> int:
            if full is None:
                return 0
            calls = [
                (_encode([one for one in full if one is not None and one.digest == digest]),) for digest in digests
            ]
            return sum(self._receivers.call("unpack", calls, left()))

        if filling is None or full is None or (self._senders.is_here and self._receivers.is_here):
            pack()
            return unpack()
        if self._senders.is_here:  # the calling thread is theirs
            return int(at_once([pack, unpack])[1])
        return int(at_once([unpack, pack])[0])


class PackedOnHost(Packed):
    """Through slabs in the host's memory, to which each sender copies from its device, and each receiver to its own."""

    is_on_host = True


class Collective(Bucketed):
    """Through a group of all senders and receivers, each on a device of its own."""

    route = "collective"

    def __init__(self, senders: Parties, receivers: Parties) -> None:
        super().__init__(senders, receivers)
        self._timeout_s = 0.0

    def _connect(self, slot_bytes: int, left: Left) -> int:
        if self.meeting and self._timeout_s < left():
            return 0
        self._leave(left)
        self.meeting, self._timeout_s = str(new_store()), _PATIENCE * left()
        size = len(self._senders) + len(self._receivers)
        join = [(self.meeting, rank, size, self._timeout_s) for rank in range(size)]
        self._beside(
            lambda: self._senders.call("join", join[: len(self._senders)], left()),
            lambda: self._receivers.call("join", join[len(self._senders) :], left()),
        )
        return 0

    def _leave(self, left: Left) -> None:
        if self.meeting:
            self._senders.call("leave", [(self.meeting,)] * len(self._senders), left())
            self._receivers.call("leave", None, left())
            shutil.rmtree(self.meeting, ignore_errors=True)

    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: Left) -> int:
        steps = self._steps(round_id, digests, is_checked)
        sends, receives = self._schedules(steps, digests)
        _, received = self._beside(
            lambda: self._senders.call("send", [(_encode(one),) for one in sends], left()),
            lambda: self._receivers.call("receive", [(_encode(one),) for one in receives], left()),
        )
        return sum(received)

    def _schedules(
        self, steps: Sequence[Sequence[Packing | None]], digests: Sequence[str]
    ) -> tuple[list[Sending], list[list[Packing]]]:
        """All members go by one order (step, sender, receiver), so that none waits for one that waits for it."""
        first = len(self._senders)
        ranks = {digest: [first + r for r, own in enumerate(digests) if own == digest] for digest in digests}
        sends = []
        for sender in range(first):
            packings = [row[sender] for row in steps]
            filled = [one for one in packings if one is not None]
            sends.append(
                Sending(meeting=self.meeting, packings=filled, receivers=[ranks[one.digest] for one in filled])
            )
        everything = [one for row in steps for one in row if one is not None]
        return sends, [[one for one in everything if one.digest == digest] for digest in digests]

    def _beside(self, senders: Callable[[], list[int]], receivers: Callable[[], list[int]]) -> tuple[list[int], ...]:
        if self._receivers.is_here:  # the calling thread is theirs
            received, sent = at_once([receivers, senders])
            return sent, received
        sent, received = at_once([senders, receivers])
        return sent, received


PATHS: tuple[type[Path], ...] = (Local, Direct, Packed, Collective, PackedOnHost)
"""In the order in which they are tried."""
