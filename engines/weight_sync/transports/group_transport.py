"""The base of transports whose peers form a process group."""

from __future__ import annotations

from typing import ClassVar

from rlcore.engines.weight_sync.channels.peers import Call
from rlcore.engines.weight_sync.transports.base import PATIENCE, TimeLeft
from rlcore.engines.weight_sync.transports.packed import StagingTransport

_LEAST_PATIENCE = PATIENCE / 2
"""Share of the time left below which a group is formed anew: rounds of one ``timeout_s`` differ by less."""


class GroupTransport(StagingTransport):
    """All senders, and perhaps all receivers, are in one process group.

    It is formed anew for a round of less time than it waits, or of much more.
    """

    are_receivers_members: ClassVar[bool]
    _timeout_s = 0.0
    """The time that the group gives each of its operations."""

    def _form_group(self, left: TimeLeft, *, is_on_host: bool) -> None:
        """Have the members join, unless they are in a group that is patient enough.

        Args:
            is_on_host: it is a group of hosts, whatever the devices are.
        """
        if self.store is not None and _LEAST_PATIENCE * left() <= self._timeout_s < left():
            return
        self.close(left)
        self.store, self._timeout_s = self._meet(), PATIENCE * left()
        size = len(self._senders) + len(self._receivers) * self.are_receivers_members
        self._join([(self.rendezvous, rank, size, self._timeout_s, is_on_host) for rank in range(size)], left)

    def _join(self, calls: list[Call], left: TimeLeft) -> None:
        self._senders.call("join", calls, left())

    def close(self, left: TimeLeft) -> None:
        if self.store is None:
            return
        self._senders.call("leave", [(self.rendezvous,)] * len(self._senders), left())
        if self.are_receivers_members:
            self._receivers.call("leave", None, left())
        self.store.remove()
        self.store = None
