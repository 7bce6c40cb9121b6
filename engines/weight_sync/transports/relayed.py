"""Trainer ranks of several machines pass buckets on to each other; receivers open the staging buffers of those nearby.

It serves a trainer that is sharded over machines with receivers on its own devices, which a process group can not take
twice:

    machine A                                    machine B
    rank 0 packs its bucket --- network ----->   rank 2 is sent it into its slot
      |                                            |
    receivers of A unpack it there               receivers of B unpack it there

A slot holds one bucket at a time, the rank's own or another's, so that this takes no memory beside that of "packed".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

from msgspec.structs import replace

from rlcore.engines.weight_sync.messages import Packing, Relaying
from rlcore.engines.weight_sync.transports.base import TimeLeft
from rlcore.engines.weight_sync.transports.group_transport import GroupTransport
from rlcore.engines.weight_sync.transports.packed import SharedSlotsTransport, SlotStep, encode


class RelayedTransport(GroupTransport, SharedSlotsTransport):
    """Every trainer rank is in a process group; each receiver opens the memory of some."""

    route = "relayed"
    are_receivers_members = False

    def _connect(self, slot_bytes: int, left: TimeLeft) -> int:
        self._form_group(left, is_on_host=False)
        return super()._connect(slot_bytes, left)

    def _exchange_events(self, left: TimeLeft) -> bool:
        return False  # a slot is filled by its own rank or by another: each waits for its own device

    def _schedule(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool]) -> list[SlotStep]:
        rows = self._steps(round_id, digests, is_checked)
        waiting = [deque(filter(None, column)) for column in zip(*rows, strict=True)]
        steps: list[SlotStep] = []
        while any(waiting):
            steps.append(self._next_step(waiting, digests, slot=len(steps) % 2))
        return steps

    def _next_step(self, waiting: Sequence[deque[Packing]], digests: Sequence[str], *, slot: int) -> SlotStep:
        """Take as many of the buckets that wait as there are slots for, of senders of all machines by turns."""
        fillings: list[Relaying | None] = [None] * len(waiting)
        unpackings: list[list[Packing]] = [[] for _ in digests]
        free = self._by_turns()
        for sender in list(free):
            if sender not in free or not waiting[sender]:
                continue
            one = replace(waiting[sender][0], slot=slot)
            takers = [receiver for receiver, digest in enumerate(digests) if digest == one.digest]
            holders = self._holders(sender, takers, [rank for rank in free if rank != sender])
            if holders is None:
                continue
            waiting[sender].popleft()
            targets = sorted(set(holders.values()) - {sender})
            taken = Relaying(rendezvous=self.rendezvous, slot_bytes=one.slot_bytes, slot=slot, source=sender)
            for rank in (sender, *targets):
                free.remove(rank)
                fillings[rank] = taken
            fillings[sender] = replace(taken, packing=one, targets=targets)
            for receiver, holder in holders.items():
                unpackings[receiver].append(replace(one, holder=holder))
        return SlotStep(fillings, unpackings)

    def _by_turns(self) -> list[int]:
        """Return all senders, so that those of each machine come by turns."""
        machines = self._around.machines[: len(self._senders)]
        of_machine = [[rank for rank, own in enumerate(machines) if own == one] for one in dict.fromkeys(machines)]
        return [rank for row in zip_longest(*of_machine) for rank in row if rank is not None]

    def _holders(self, sender: int, takers: Sequence[int], free: Sequence[int]) -> dict[int, int] | None:
        """Return for each taker the sender in whose slot it finds the bucket; None if there is no free one.

        The last free ones are taken first: the first have buckets of their own to send in this step.
        """
        holders: dict[int, int] = {}
        for receiver in takers:
            reached = self._around.reached[receiver]
            if reached[sender]:
                holders[receiver] = sender
                continue
            found = next((rank for rank in holders.values() if reached[rank]), None)
            if found is None:
                found = next((rank for rank in reversed(free) if reached[rank]), None)
            if found is None:
                return None
            holders[receiver] = found
        return holders

    def _fill(self, step: SlotStep, left: TimeLeft) -> None:
        orders = [(one and encode(one),) for one in step.fillings]
        for sender, nbytes in enumerate(self._senders.call("relay", orders, left())):
            one = step.fillings[sender]
            if isinstance(one, Relaying) and one.targets:
                for target in one.targets:
                    self.sent_bytes[sender, target] += nbytes // len(one.targets)
