"""Memory of a trainer that a receiver has open: tensors and staging buffers of all ranks, until they are taken back."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.weight_sync.messages import Offer, OfferedTensor, decoded
from rlcore.engines.weight_sync.planning.execution import source_name
from rlcore.engines.weight_sync.planning.manifest import dtype_of
from rlcore.engines.weight_sync.sender import Reader, Sender, sender_here
from rlcore.engines.weight_sync.transports.staging_buffers import host_device, slot_of
from rlcore.errors import DeviceError, SyncError
from rlcore.types import IpcHandle


class ImportedMemory(Reader):
    """All memory of one trainer that is open here; there is one trainer at a time.

    Args:
        forget_copies: drops all copies that have been made ready from tensors of ``sources()``.
    """

    def __init__(self, device: Device, forget_copies: Callable[[], object]) -> None:
        self._device = device
        self._forget_copies = forget_copies
        self._offered: list[weakref.ref[Sender] | ImportedTensors | None] = []
        """By sender; None for one whose memory cannot be opened here."""
        self._given: list[Mapping[int, Tensor]] = []
        self._sources: dict[str, Tensor] = {}
        """All tensors that are in ``_given``."""
        self._staging_buffers: list[Any] = []
        self._is_on_host = False
        self._on_device: Tensor | None = None
        """The copy of a slot that is on the host."""
        self._using = threading.RLock()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Hold the memory open while it is read: a revocation waits for the end."""
        with self._using:
            yield

    def open_offers(self, offers: list[bytes], are_reached: Sequence[bool], timeout_s: float) -> int:
        """Open the tensors of all senders that are reached; returns how many handles had to be opened.

        Raises:
            DeviceError, StateError: a handle cannot be opened; says why.
        """
        self._close_offers()
        num_opened = 0
        for number, offer in enumerate(decoded(one, Offer, "offer") for one in offers):
            here = sender_here(offer.epoch)
            if here is not None:
                here.readers.add(self)
                self._offered.append(weakref.ref(here))
            elif not are_reached[number]:
                self._offered.append(None)
            elif offer.handles is None:
                raise SyncError(f"sender {offer.epoch} is not, or no longer, in this process; sync again")
            else:
                self._offered.append(ImportedTensors(offer, partial(self._import, number, timeout_s, self._device)))
                num_opened += len(offer.handles)
        return num_opened

    def open_staging_buffers(self, handles: list[bytes], are_reached: Sequence[bool], timeout_s: float) -> int:
        """Open the staging buffers of all senders that are reached; returns how many handles had to be opened.

        Raises:
            DeviceError, StateError: a handle cannot be opened; says why.
        """
        self._close_staging_buffers()
        for sender, handle in enumerate(map(IpcHandle.from_bytes, handles)):
            if not are_reached[sender]:
                self._staging_buffers.append(None)
                continue
            self._is_on_host = handle.device != self._device.spec.name
            owner = host_device() if self._is_on_host else self._device
            self._staging_buffers += self._import(sender, timeout_s, owner, [handle])
        return sum(are_reached)

    def sources(self) -> dict[str, Tensor]:
        """Return the senders' tensors by ``source_name``; the same mapping while none has moved.

        Raises:
            SyncError: none are open.
        """
        if not self._offered:
            raise SyncError("data came out of order: the trainer's tensors have not been opened")
        given = list(map(_given_by, self._offered))
        if len(given) != len(self._given) or any(map(is_not, given, self._given)):
            self._given = given
            self._sources = {
                source_name(sender, number): tensor
                for sender, tensors in enumerate(given)
                for number, tensor in tensors.items()
            }
        return self._sources

    def forget_sources(self) -> None:
        """Hold no tensor of a sender until the next ``sources()``."""
        with self._using:
            self._given, self._sources = [], {}
            self._forget_copies()

    def slot(self, sender: int, slot: int) -> Tensor:
        """Return a slot of a sender where it is, [slot_bytes] uint8.

        Raises:
            SyncError: it is not open.
        """
        if sender not in range(len(self._staging_buffers)) or self._staging_buffers[sender] is None:
            raise SyncError(f"data came out of order: the staging buffers of sender {sender} have not been opened")
        return slot_of(self._staging_buffers[sender].tensor, slot)

    def received(self, sender: int, slot: int, nbytes: int) -> Tensor:
        """Return a slot on this device, of which ``nbytes`` are there, until the next one is asked for."""
        found = self.slot(sender, slot)
        if not self._is_on_host:
            return found
        if self._on_device is None or self._on_device.numel() != found.numel():
            self._on_device = torch.empty_like(found, device=self._device.torch_device)
        self._on_device[:nbytes].copy_(found[:nbytes])
        return self._on_device

    def close(self) -> None:
        self._close_offers()
        self._close_staging_buffers()

    def _import(self, sender: int, timeout_s: float, owner: Any, handles: Sequence[IpcHandle]) -> list[Any]:
        # Not while ``_using`` is held: a revocation that waits for it holds up the answer.
        try:
            mappings: list[Any] = owner.memory.import_ipc_together(handles, self._let_go, timeout_s=timeout_s)
            return mappings
        except DeviceError as error:
            raise DeviceError(f"the memory of the trainer's rank {sender} cannot be opened: {error}") from error

    def _let_go(self, mapping: Any) -> None:
        """Close a mapping that its owner takes back."""
        with self._using:
            self._device.synchronize()  # what was queued may read it yet
            mapping.close()

    def _close_offers(self) -> None:
        for offered in self._offered:
            if isinstance(offered, ImportedTensors):
                offered.close()
        self._offered, self._given, self._sources = [], [], {}

    def _close_staging_buffers(self) -> None:
        if self._staging_buffers:
            self._device.synchronize()
        for mapping in filter(None, self._staging_buffers):
            mapping.close()
        self._staging_buffers, self._on_device, self._is_on_host = [], None, False


def _given_by(offered: weakref.ref[Sender] | ImportedTensors | None) -> Mapping[int, Tensor]:
    if offered is None:
        return {}
    found = offered() if isinstance(offered, weakref.ref) else offered
    if found is None:
        raise SyncError("the trainer whose tensors were read here is gone; sync again")
    return found.tensors()


class ImportedTensors:
    """The tensors of one sender in another process, until it takes the memory back or ``close`` is called.

    Args:
        open_handles: opens the offer's handles and returns their mappings, each with ``.tensor`` and ``.close()``.
    """

    def __init__(self, offer: Offer, open_handles: Callable[[Sequence[IpcHandle]], list[Any]]) -> None:
        self._mappings = open_handles(offer.handles or ())
        try:
            self._tensors = _in_blocks([mapping.tensor for mapping in self._mappings], offer.tensors)
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Mapping[int, Tensor]:
        """Return the rows that the sender has of each parameter, by the parameter's number, [numel] each.

        Raises:
            StateError: the sender has taken some back.
        """
        for mapping in self._mappings:
            _ = mapping.tensor
        return self._tensors

    def close(self) -> None:
        self._tensors = {}
        for mapping in self._mappings:
            mapping.close()


def _in_blocks(blocks: Sequence[Tensor], offered: Sequence[OfferedTensor]) -> dict[int, Tensor]:
    """Return the offered tensors by number, [numel] each. One operation of torch makes each: they are many."""
    typed: dict[tuple[int, str], tuple[Tensor, int, int, int]] = {}
    found = {}
    for one in offered:
        key = one.handle, one.dtype
        if key not in typed:
            block = _typed(blocks[one.handle], one.dtype)
            typed[key] = block, block.numel(), block.element_size(), int(block.storage_offset())
        block, most, itemsize, begin = typed[key]
        first, beside = divmod(one.offset_bytes, itemsize)
        if first < 0 or beside or first + one.numel > most:
            raise SyncError(
                f"a tensor of {one.numel} {one.dtype} was offered at byte {one.offset_bytes} of a block of "
                f"{blocks[one.handle].numel()}"
            )
        found[one.number] = block.as_strided((one.numel,), (1,), begin + first)
    return found


def _typed(block: Tensor, dtype: str) -> Tensor:
    kind = dtype_of(dtype)
    return block[: block.numel() // kind.itemsize * kind.itemsize].view(kind)
