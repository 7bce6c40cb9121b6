"""Senders send their staging buffers through a process group of all senders and receivers (NCCL, HCCL, gloo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlcore.engines.launchers.runtime_files import StoreFolder
from rlcore.engines.weight_sync.channels.peers import SyncPeers, at_once
from rlcore.engines.weight_sync.messages import Packing, Sending
from rlcore.engines.weight_sync.transports.base import PATIENCE, TimeLeft
from rlcore.engines.weight_sync.transports.packed import StagingTransport, encode


class CollectiveTransport(StagingTransport):
    """Every sender and receiver is in a process and on a device of its own. No memory is shared."""

    route = "collective"

    def __init__(self, senders: SyncPeers, receivers: SyncPeers) -> None:
        super().__init__(senders, receivers)
        self._timeout_s = 0.0

    def _connect(self, slot_bytes: int, left: TimeLeft) -> int:
        if self.store is not None and self._timeout_s < left():
            return 0
        self.close(left)
        self.store, self._timeout_s = StoreFolder(), PATIENCE * left()
        size = len(self._senders) + len(self._receivers)
        join = [(self.rendezvous, rank, size, self._timeout_s) for rank in range(size)]
        self._beside(
            lambda: self._senders.call("join", join[: len(self._senders)], left()),
            lambda: self._receivers.call("join", join[len(self._senders) :], left()),
        )
        return 0

    def close(self, left: TimeLeft) -> None:
        if self.store is not None:
            self._senders.call("leave", [(self.rendezvous,)] * len(self._senders), left())
            self._receivers.call("leave", None, left())
            self.store.remove()
            self.store = None

    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: TimeLeft) -> int:
        steps = self._steps(round_id, digests, is_checked)
        sends, receives = self._schedules(steps, digests)
        _, received = self._beside(
            lambda: self._senders.call("send", [(encode(one),) for one in sends], left()),
            lambda: self._receivers.call("receive", [(encode(one),) for one in receives], left()),
        )
        return sum(received)

    def _schedules(
        self, steps: Sequence[Sequence[Packing | None]], digests: Sequence[str]
    ) -> tuple[list[Sending], list[list[Packing]]]:
        """Return what each sender sends and each receiver receives.

        All members go by one order (step, sender, receiver), so that none waits for one that waits for it.
        """
        first = len(self._senders)
        ranks = {digest: [first + r for r, own in enumerate(digests) if own == digest] for digest in digests}
        sends = []
        for sender in range(first):
            packings = [row[sender] for row in steps]
            filled = [one for one in packings if one is not None]
            sends.append(
                Sending(rendezvous=self.rendezvous, packings=filled, receivers=[ranks[one.digest] for one in filled])
            )
        everything = [one for row in steps for one in row if one is not None]
        return sends, [[one for one in everything if one.digest == digest] for digest in digests]

    def _beside(self, senders: Callable[[], list[int]], receivers: Callable[[], list[int]]) -> tuple[list[int], ...]:
        """Call both sides at once: a member of the group waits for the others."""
        if self._receivers.is_here:  # the calling thread is theirs
            received, sent = at_once([receivers, senders])
            return sent, received
        sent, received = at_once([senders, receivers])
        return sent, received
