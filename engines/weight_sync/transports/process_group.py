"""The process group of the route "collective": all trainer ranks, then all receivers, each on a device of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

import torch
from torch import Tensor

from rlcore._torch_private import Store
from rlcore.collectives.groups import new_group
from rlcore.device import Device
from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT
from rlcore.engines.weight_sync.transports.bucket_header import check_message_bytes, header_of
from rlcore.errors import SyncError
from rlcore.process.network_interface import use_interface_of

T = TypeVar("T")


class Turns:
    """Pieces of work that are done one after the other, beside the calling thread where tensors are on the host.

    So a bucket is packed or unpacked while another is on its way. A device's library queues its work on the current
    stream and returns at once: that is done in the calling thread, when it waits for it.
    """

    def __init__(self, device: Device) -> None:
        self._thread = ThreadPoolExecutor(1) if device.spec.is_host else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin a piece of work; returns what waits for it and returns its result."""
        return work if self._thread is None else self._thread.submit(work).result


class SyncGroup:
    """One member of the group. Sends and receives are matched by their order: all members go by one schedule.

    Inside ``with`` an error, or Ctrl-C, ends the membership at once: the others wait for what does not come any more,
    and are told the reason.

    Args:
        meet: the folder or the store through which the members find each other.
        address: of this host, for members on others; "" leaves it to the collective library.
    """

    def __init__(
        self, device: Device, meet: str | Store, rank: int, world_size: int, timeout_s: float, *, address: str = ""
    ) -> None:
        self._torch_device = device.torch_device
        """The group's own: the host's where members are on several kinds of device."""
        self._meet = meet  # torch does not keep a store that is written in Python
        use_interface_of(address)
        self._group = new_group(
            device, rank=rank, world_size=world_size, rendezvous=meet, timeout_s=timeout_s, name="weights"
        )

    def send_message(self, message: Tensor, ranks: Sequence[int], *, is_size_known: bool = False) -> None:
        """Send a packed slot, [n] uint8, all in use.

        Args:
            is_size_known: to the receivers. Else the header goes first, which tells them.
        """
        message = message.to(self._torch_device)
        parts = [message] if is_size_known else [message[:ALIGNMENT], message[ALIGNMENT:]]
        for rank in ranks:
            for part in parts:
                if part.numel():
                    self._group.send(part, rank)

    def receive_message(self, slot: Tensor, rank: int, nbytes: int | None = None) -> int:
        """Overwrite a slot, [slot_bytes] uint8, by what a rank sends; returns the bytes in use.

        Args:
            nbytes: those of the message, where they are known; the host then waits for nothing.

        Raises:
            SyncError: it would not fit.
        """
        here = slot if slot.device == self._torch_device else torch.empty_like(slot, device=self._torch_device)
        begin = 0
        if nbytes is None:
            self._group.recv(here[:ALIGNMENT], rank)
            header = header_of(here)
            check_message_bytes(header, slot.numel())
            begin, nbytes = ALIGNMENT, header.message_bytes
        if nbytes > begin:
            self._group.recv(here[begin:nbytes], rank)
        if here is not slot:
            slot[:nbytes].copy_(here[:nbytes])
        return nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._group.__exit__(type(error), error, None)

    def leave(self) -> None:
        """Leave at once: the others may be elsewhere, or gone."""
        self.__exit__(None, SyncError("it is over"), None)
