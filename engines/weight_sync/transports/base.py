"""The contract of a transport: how bytes get from senders to receivers.

A transport runs in the program that drives the round. It moves no bytes itself: it calls methods of all senders or all
receivers at once, with plain data, and these open memory, pack, unpack and copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

from rlcore.engines.weight_sync.channels.peers import SyncPeers

Route = Literal["local", "direct", "packed", "collective", "relayed"]
ROUTES: tuple[Route, ...] = ("local", "direct", "packed", "collective", "relayed")
PATIENCE = 0.7
"""Share of the time left for which one side waits for the other: it can say so before its own caller ends it."""
TimeLeft = Callable[[], float]
"""Returns the seconds until the round's deadline; raises SyncError after it."""


class MeetingPlace(Protocol):
    """The place where the members of one process group find each other; it goes with ``remove``."""

    path: str
    """Its name, which members are given."""

    @property
    def remove(self) -> Callable[[], object]: ...


class Surroundings(NamedTuple):
    """The machines of the two sides, and which memory each receiver can open."""

    machines: list[str]
    """Boot ids, first those of the senders."""
    kinds: set[str]
    """Registered names of all kinds of device."""
    reached: list[list[bool]]
    """For each receiver, and each sender, True if the receiver can open the sender's memory."""
    session: str = ""
    """The name of the session between them, which no other of these senders has."""


class Transport(ABC):
    """Moves plans between these senders and receivers; what it has opened stays open for the next round.

    ``open`` comes first, once in every round. Then ``move`` is called any number of times, or ``move_last`` once where
    the round has nothing else to move. A round that fails drops the transport.

    Args:
        senders: all trainer ranks of the round.
        receivers: all workers of the engines that take the weights.
        meet: makes a place where all of them can meet.
        around: where all of them are.
    """

    route: ClassVar[Route]
    """Its name for users, who ask for it by ``route=`` and read it in ``SyncReport.route``."""
    is_on_host: ClassVar[bool] = False
    """It goes through shared memory of the host, because other processes cannot open the devices' own."""

    is_asked = False
    """The caller asked for this route, and knows why: it is taken even where another one would be quicker."""
    is_scattered = False
    """``open`` refused because there is too much memory to open each time."""
    waits_by_event = False
    """Devices wait for each other, and not each process for its own."""
    store: MeetingPlace | None = None
    """The meeting place of the process group that it has formed, for as long as any member is in the group."""

    def __init__(
        self, senders: SyncPeers, receivers: SyncPeers, meet: Callable[[], MeetingPlace], around: Surroundings
    ) -> None:
        self._senders = senders
        self._receivers = receivers
        self._meet = meet
        self._around = around
        self.sent_bytes: Counter[tuple[int, int]] = Counter()
        """The bytes of weights that went through a process group, by the numbers of the ends in ``machines``.
        """

    @property
    def rendezvous(self) -> str:
        """The path of ``store``, "" without one."""
        return "" if self.store is None else self.store.path

    def close(self, left: TimeLeft) -> None:  # noqa: B027
        """Let go of what peers do not let go of by themselves; another transport of the same peers follows."""

    @abstractmethod
    def open(self, digests: Sequence[str], slot_bytes: int, generation: int, left: TimeLeft) -> int:
        """Make ready to move the plan ``digests[r]`` to each receiver r; writes nothing that an engine uses.

        Args:
            slot_bytes: size of each of a sender's two staging buffers.
            generation: another number when the senders' memory may have moved.

        Returns:
            The number of memory handles that were opened for it.

        Raises:
            UnsupportedError, DeviceError: it cannot be had here; says why.
        """

    @abstractmethod
    def move(self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: TimeLeft) -> int:
        """Move one plan to each receiver.

        Args:
            is_checked: takes the number of a step; True where its buckets carry checksums.

        Returns:
            The bytes that all receivers took.
        """

    def move_last(
        self, round_id: int, digests: Sequence[str], is_checked: Callable[[int], bool], left: TimeLeft
    ) -> tuple[int, list[int]]:
        """Do what ``move`` does, where nothing else comes in this round.

        Returns:
            The bytes that all receivers took, and what each receiver lacks (``Receiver.ready``).
        """
        moved = self.move(round_id, digests, is_checked, left)
        return moved, self._receivers.call("ready", [(round_id,)] * len(self._receivers), left())
