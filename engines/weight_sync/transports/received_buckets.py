"""The memory into which a receiver takes buckets that come through a process group, and changes to what it has."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.engines.weight_sync.messages import Reception
from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT, Bucket
from rlcore.engines.weight_sync.planning.execution import CopyExecution
from rlcore.engines.weight_sync.transports import delta
from rlcore.engines.weight_sync.transports.bucket_header import BucketHeader
from rlcore.engines.weight_sync.transports.process_group import SyncGroup, Turns
from rlcore.engines.weight_sync.transports.staging_buffers import check_slot_bytes, views


class ReceivedBuckets:
    """Buckets on their way into an engine's weights, in memory of their own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        """Where buckets of the process group come to."""
        self._rebuilt: Tensor | None = None
        """The bucket that changes are applied to."""

    def drop(self) -> None:
        """Free the memory for a process group's buckets."""
        self._buffers = []

    def drop_rebuilt(self) -> None:
        self._rebuilt = None

    def received(self, group: SyncGroup, orders: Sequence[Reception], buckets: Sequence[Bucket]) -> Generator[Tensor]:
        """Receive and pass on each bucket, and yield its slot; the next one may come meanwhile."""

        def receive(number: int) -> Tensor:
            order = orders[number]
            slot, is_size_known = self._buffer(order.packing.slot_bytes, number), order.packing.is_size_known
            used = group.receive_message(slot, order.source, buckets[number].nbytes if is_size_known else None)
            group.send_message(slot[:used], order.relays, is_size_known=is_size_known)
            return slot

        with Turns(self._device) as turns:
            wait = turns.start(partial(receive, 0)) if orders else None
            for number in range(1, len(orders) + 1):
                assert wait is not None
                slot = wait()
                wait = turns.start(partial(receive, number)) if number < len(orders) else None
                yield slot

    def _buffer(self, slot_bytes: int, number: int) -> Tensor:
        """Return the memory for a bucket, [slot_bytes] uint8; on the host the next one is another."""
        check_slot_bytes(slot_bytes)
        if not self._buffers or self._buffers[0].numel() != slot_bytes:
            count = 2 if self._device.spec.is_host else 1
            self._buffers = [self._empty(slot_bytes) for _ in range(count)]
        return self._buffers[number % len(self._buffers)]

    def repacked(
        self, copies: CopyExecution, destinations: Mapping[str, Tensor], bucket: Bucket, slot_bytes: int
    ) -> Tensor:
        """Return a bucket of what is here, packed as the sender packs its own."""
        if self._rebuilt is None or self._rebuilt.numel() != slot_bytes:
            self._rebuilt = self._empty(slot_bytes)
        self._rebuilt[: bucket.nbytes].zero_()  # as the sender's gaps are
        copies.run(destinations, views(self._rebuilt, bucket))
        return self._rebuilt

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)


def changed(whole: Tensor, bucket: Bucket, slot: Tensor, header: BucketHeader) -> Tensor:
    """Apply the changes in a slot to a bucket; return the bucket."""
    message = slot[ALIGNMENT : header.message_bytes]
    word = delta.word_of(bucket.dtypes)
    delta.apply(message, header.encoding, header.num_changed, whole[ALIGNMENT : bucket.nbytes], word)
    return whole
