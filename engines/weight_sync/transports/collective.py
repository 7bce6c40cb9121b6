"""Senders send their staging buffers through a process group of all senders and receivers (NCCL, HCCL, gloo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlcore.engines.weight_sync.channels.peers import Call, at_once
from rlcore.engines.weight_sync.messages import Packing, Reception, Sending
from rlcore.engines.weight_sync.transports.base import TimeLeft
from rlcore.engines.weight_sync.transports.group_transport import GroupTransport
from rlcore.engines.weight_sync.transports.packed import encode


class CollectiveTransport(GroupTransport):
    """Every sender and receiver is in a process and on a device of its own. No memory is shared.

    A bucket goes once to each other machine. One of its receivers there takes it, by turns, and passes it on to the
    others through the same group, which inside a machine has better ways than the network. Between devices of different
    kinds the group is one of hosts (gloo).
    """

    route = "collective"
    are_receivers_members = True

    def _connect(self, slot_bytes: int, left: TimeLeft) -> int:
        # no library of devices joins several kinds
        self._form_group(left, is_on_host=len(self._around.kinds) > 1)
        return 0

    def _join(self, calls: list[Call], left: TimeLeft) -> None:
        first = len(self._senders)
        self._beside("join", calls[:first], "join", calls[first:], left())

    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: TimeLeft) -> int:
        steps = self._steps(round_id, digests, is_checked)
        sends, receives = self._schedules(steps, digests)
        orders, takes = [(encode(one),) for one in sends], [(encode(one),) for one in receives]
        _, received = self._beside("send", orders, "receive", takes, left())
        for receiver, (receptions, sizes) in enumerate(zip(receives, received, strict=True)):
            for one, nbytes in zip(receptions, sizes, strict=True):
                self.sent_bytes[one.source, len(self._senders) + receiver] += nbytes
        return sum(map(sum, received))

    def _schedules(
        self, steps: Sequence[Sequence[Packing | None]], digests: Sequence[str]
    ) -> tuple[list[Sending], list[list[Reception]]]:
        """Return what each sender sends and each receiver receives.

        All members go by one order (step, sender, receiver), and what is passed on goes before the next bucket, so that
        none waits for one that waits for it.
        """
        first = len(self._senders)
        ranks = {digest: [first + r for r, own in enumerate(digests) if own == digest] for digest in digests}
        sends = [Sending(rendezvous=self.rendezvous, packings=[], receivers=[]) for _ in range(first)]
        receives: list[list[Reception]] = [[] for _ in digests]
        for step, row in enumerate(steps):
            for one in filter(None, row):
                tree = relay_tree(one.sender, ranks[one.digest], self._around.machines, step)
                sends[one.sender].packings.append(one)
                sends[one.sender].receivers.append(tree[one.sender])
                for source, targets in tree.items():
                    for target in targets:
                        reception = Reception(packing=one, source=source, relays=tree.get(target, []))
                        receives[target - first].append(reception)
        return sends, receives

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


def relay_tree(sender: int, ranks: Sequence[int], machines: Sequence[str], turn: int) -> dict[int, list[int]]:
    """Return the ranks that the sender, and each rank that passes a bucket on, sends it to.

    Args:
        ranks: all that receive it.
        machines: of every rank.
        turn: another number for the next bucket, so that each rank of a machine takes its part from the network.
    """
    by_machine: dict[str, list[int]] = {}
    for rank in ranks:
        by_machine.setdefault(machines[rank], []).append(rank)
    tree: dict[int, list[int]] = {sender: by_machine.pop(machines[sender], [])}
    for members in by_machine.values():
        head = members[turn % len(members)]
        tree[sender].append(head)
        tree[head] = [rank for rank in members if rank != head]
    return tree
