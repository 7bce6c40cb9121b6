"""What a receiver reaches of a trainer: the tensors and slabs of all its ranks, until they are taken back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.weight_sync.endpoint import decoded
from rlcore.engines.weight_sync.planning.execution import source_name
from rlcore.engines.weight_sync.sender import Offer, Sender, sender_here
from rlcore.engines.weight_sync.transports.opened import Opened
from rlcore.engines.weight_sync.transports.slabs import host, slot_of
from rlcore.errors import DeviceError, SyncError
from rlcore.types import IpcHandle


class Reach:
    """Of one trainer at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._offered: list[Sender | Opened] = []
        self._given: list[Mapping[int, Tensor]] = []
        self._sources: dict[str, Tensor] = {}
        """All that is in ``_given``."""
        self._slabs: list[Any] = []
        self._is_on_host = False
        self._room: Tensor | None = None
        """For what is in a slab on the host."""
        self._using = threading.RLock()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Held while the memory is read: a revocation waits for it."""
        with self._using:
            yield

    def open_offers(self, offers: list[bytes], timeout_s: float) -> int:
        """Reach the tensors of all senders; the handles that had to be opened.

        Raises:
            DeviceError, StateError: a handle cannot be opened; says why.
        """
        self._close_offers()
        opened = 0
        for number, offer in enumerate(decoded(one, Offer, "offer") for one in offers):
            here = sender_here(offer.epoch)
            if here is not None:
                self._offered.append(here)
            elif offer.handles is None:
                raise SyncError(f"sender {offer.epoch} is not, or no longer, in this process; sync again")
            else:
                self._offered.append(Opened(offer, partial(self._import, number, timeout_s, self._device)))
                opened += len(offer.handles)
        return opened

    def open_slabs(self, handles: list[bytes], timeout_s: float) -> int:
        """Reach the slabs of all senders, as ``open_offers`` does; the handles that had to be opened."""
        self._close_slabs()
        for sender, handle in enumerate(map(IpcHandle.from_bytes, handles)):
            self._is_on_host = handle.device != self._device.spec.name
            owner = host() if self._is_on_host else self._device
            self._slabs += self._import(sender, timeout_s, owner, [handle])
        return len(handles)

    def sources(self) -> dict[str, Tensor]:
        """The senders' tensors by ``source_name``; the same mapping while none has moved."""
        given = [offered.tensors() for offered in self._offered]
        if len(given) != len(self._given) or any(map(is_not, given, self._given)):
            self._given = given
            self._sources = {
                source_name(sender, number): tensor
                for sender, tensors in enumerate(given)
                for number, tensor in tensors.items()
            }
        return self._sources

    def slot(self, sender: int, slot: int) -> Tensor:
        """A slot of a sender's slabs, where it is."""
        return slot_of(self._slabs[sender].tensor, slot)

    def received(self, sender: int, slot: int, nbytes: int) -> Tensor:
        """A slot on this device, as far as ``nbytes``; until the next is asked for."""
        found = self.slot(sender, slot)
        if not self._is_on_host:
            return found
        if self._room is None or self._room.numel() != found.numel():
            self._room = torch.empty_like(found, device=self._device.torch_device)
        self._room[:nbytes].copy_(found[:nbytes])
        return self._room

    def close(self) -> None:
        self._close_offers()
        self._close_slabs()

    def _import(self, sender: int, timeout_s: float, owner: Any, handles: Sequence[IpcHandle]) -> list[Any]:
        # Not while ``_using`` is held: a revocation that waits for it holds up the answer.
        try:
            mappings: list[Any] = owner.memory.import_ipc_together(handles, self._let_go, timeout_s=timeout_s)
            return mappings
        except DeviceError as error:
            raise DeviceError(f"the memory of the trainer's rank {sender} cannot be opened: {error}") from error

    def _let_go(self, mapping: Any) -> None:
        with self._using:
            self._device.synchronize()  # what was queued may read it yet
            mapping.close()

    def _close_offers(self) -> None:
        for offered in self._offered:
            if isinstance(offered, Opened):
                offered.close()
        self._offered, self._given, self._sources = [], [], {}

    def _close_slabs(self) -> None:
        if self._slabs:
            self._device.synchronize()
        for mapping in self._slabs:
            mapping.close()
        self._slabs, self._room, self._is_on_host = [], None, False
