"""Senders send their staging buffers through a process group of all senders and receivers (NCCL, HCCL, gloo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlcore.engines.weight_sync.channels.peers import Call, SyncPeers, at_once
from rlcore.engines.weight_sync.messages import Packing, Sending
from rlcore.engines.weight_sync.transports.base import PATIENCE, MeetingPlace, TimeLeft
from rlcore.engines.weight_sync.transports.packed import StagingTransport, encode


class CollectiveTransport(StagingTransport):
    """Every sender and receiver is in a process and on a device of its own. No memory is shared."""

    route = "collective"

    def __init__(self, senders: SyncPeers, receivers: SyncPeers, meet: Callable[[], MeetingPlace]) -> None:
        super().__init__(senders, receivers, meet)
        self._timeout_s = 0.0

    def _connect(self, slot_bytes: int, left: TimeLeft) -> int:
        if self.store is not None and self._timeout_s < left():
            return 0
        self.close(left)
        self.store, self._timeout_s = self._meet(), PATIENCE * left()
        size = len(self._senders) + len(self._receivers)
        join = [(self.rendezvous, rank, size, self._timeout_s) for rank in range(size)]
        self._beside("join", join[: len(self._senders)], "join", join[len(self._senders) :], left())
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
        orders, takes = [(encode(one),) for one in sends], [(encode(one),) for one in receives]
        _, received = self._beside("send", orders, "receive", takes, left())
        for receiver, (packings, sizes) in enumerate(zip(receives, received, strict=True)):
            for one, nbytes in zip(packings, sizes, strict=True):
                self.sent_bytes[one.sender, receiver] += nbytes
        return sum(map(sum, received))

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

    def _beside(
        self, of_senders: str, sends: list[Call], of_receivers: str, receives: list[Call], timeout_s: float
    ) -> tuple[list[Any], list[Any]]:
        """Call both sides at once, because a member of the group waits for the others; returns the results of each."""
        sending = partial(self._senders.start, of_senders, sends, timeout_s)
        receiving = partial(self._receivers.start, of_receivers, receives, timeout_s)
        if self._receivers.is_here:  # the calling thread is theirs
            finish_receiving, finish_sending = at_once([receiving, sending])
        else:
            finish_sending, finish_receiving = at_once([sending, receiving])
        return finish_sending(), finish_receiving()
