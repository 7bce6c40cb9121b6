"""The process group of the route "collective": all trainer ranks, then all receivers, each on a device of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlcore._torch_private import Store
from rlcore.collectives.groups import new_group
from rlcore.device import Device
from rlcore.errors import SyncError
from rlcore.process.network_interface import use_interface_of


class SyncGroup:
    """One member of the group. Sends and receives are matched by their order: all members go by one schedule.

    Args:
        meet: the folder or the store through which the members find each other.
        address: of this host, for members on others; "" leaves it to the collective library.
    """

    def __init__(
        self, device: Device, meet: str | Store, rank: int, world_size: int, timeout_s: float, *, address: str = ""
    ) -> None:
        self._meet = meet  # torch does not keep a store that is written in Python
        use_interface_of(address)
        self._group = new_group(
            device, rank=rank, world_size=world_size, rendezvous=meet, timeout_s=timeout_s, name="weights"
        )

    def send(self, data: Tensor, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._group.send(data, rank)

    def receive(self, data: Tensor, rank: int) -> None:
        self._group.recv(data, rank)

    def leave(self) -> None:
        """Leave at once: the others may be elsewhere, or gone."""
        over = SyncError("it is over")
        self._group.__exit__(SyncError, over, None)
