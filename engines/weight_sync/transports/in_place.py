"""Receivers copy from the senders' own tensors: in one process, or through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlcore.engines.weight_sync.channels.peers import SyncPeers
from rlcore.engines.weight_sync.transports.base import PATIENCE, MeetingPlace, Surroundings, TimeLeft, Transport
from rlcore.errors import UnsupportedError

MOST_HANDLES = 32
"""A receiver opens at most so many handles of a sender each time that the sender's memory has moved. Where there are
more, staging buffers, which stay open, take their place, unless there are many bytes for each handle."""
MANY_BYTES = 1 << 28
"""Through staging buffers these bytes take about 3 ms longer, and a handle is opened in half a millisecond
(``bench/results``, H200)."""


class InPlaceTransport(Transport):
    """The plan of each receiver is one batch of copies from the senders' tensors."""

    def __init__(
        self, senders: SyncPeers, receivers: SyncPeers, meet: Callable[[], MeetingPlace], around: Surroundings
    ) -> None:
        super().__init__(senders, receivers, meet, around)
        self._generation = -1
        self._was_open = False

    def open(self, digests: Sequence[str], slot_bytes: int, generation: int, left: TimeLeft) -> int:
        if generation == self._generation:
            return 0
        self._generation = -1
        found = self._senders.call("offer", [(self.is_shared,)] * len(self._senders), left())
        offers = [one[0] for one in found]
        for _, num_handles, nbytes in found:
            self._check_reopening(num_handles, nbytes)
        calls = [(offers, PATIENCE * left())] * len(self._receivers)
        num_opened = self._receivers.call("open_offers", calls, left())
        self._generation, self._was_open = generation, True
        return sum(num_opened)

    def _check_reopening(self, num_handles: int, nbytes: int) -> None:
        """Refuse to open too many handles a second time. The first opening may take long: nothing may move after it."""
        most = max(MOST_HANDLES, nbytes // MANY_BYTES)
        self.is_scattered = self._was_open and not self.is_asked and num_handles > most
        if self.is_scattered:
            raise UnsupportedError(
                "opening the trainer's weights again each time that they were offloaded",
                f"they lie in {num_handles} blocks of memory, of which {most} would be few; staging buffers stay open",
            )

    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: TimeLeft) -> int:
        return sum(moved for (moved,) in self._pull(round_id, digests, left, is_last=False))

    def move_last(
        self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: TimeLeft
    ) -> tuple[int, list[int]]:
        moved, missing = zip(*self._pull(round_id, digests, left, is_last=True), strict=True)
        return sum(moved), list(missing)

    def _pull(self, round_id: int, digests: Sequence[str], left: TimeLeft, *, is_last: bool) -> list[list[int]]:
        """Copy, and vote in the same call if ``is_last``: each call costs a round trip."""
        return self._receivers.call("pull", [(round_id, digest, is_last) for digest in digests], left())

    @property
    def is_shared(self) -> bool:
        """The receivers are in other processes."""
        return self.route == "direct"


class LocalTransport(InPlaceTransport):
    """All senders and receivers are in one process."""

    route = "local"


class DirectTransport(InPlaceTransport):
    """Receivers open the memory of the senders' devices (CUDA IPC or what the device has for it)."""

    route = "direct"
