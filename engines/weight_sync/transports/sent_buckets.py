"""Copies of the buckets that a sender sent last: the base that the next round's changes are told against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore import held_memory
from rlcore.device import Device
from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT, Bucket
from rlcore.engines.weight_sync.transports.bucket_header import BucketHeader, checksum
from rlcore.engines.weight_sync.transports.delta import encode, word_of
from rlcore.errors import StateError

Key = tuple[str, int, int]
"""Digest of the plan, size of a slot, number of the bucket."""


class _SentCopy(NamedTuple):
    data: Tensor
    """The bucket without its header, [nbytes - 512] uint8."""
    round_id: int
    """The round in which it was sent; 0: none yet."""


class SentBuckets:
    """The copies, on the sender's device, or on the host while the weights are not on the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copies: dict[Key, _SentCopy] = {}
        held_memory.report(self, SentBuckets._held)

    def _held(self) -> dict[str, int]:
        on_device = sum(one.data.nbytes for one in self._copies.values() if one.data.device == self._torch_device)
        return {f"what delta syncs sent last, on {self._torch_device}": on_device}

    @property
    def _torch_device(self) -> torch.device:
        return self._device.torch_device

    def reserve(self, nbytes: Mapping[Key, int]) -> str:
        """Have memory for these buckets, of so many bytes, and for no others; returns why there is none, or ""."""
        self._copies = {key: one for key, one in self._copies.items() if key in nbytes}
        try:
            for key, count in nbytes.items():
                if key not in self._copies:
                    data = torch.empty(count - ALIGNMENT, dtype=torch.uint8, device=self._torch_device)
                    self._copies[key] = _SentCopy(data, 0)
        except RuntimeError:
            self._copies = {}
            return f"{self._device.name} has no memory for a copy of what is sent, {sum(nbytes.values())} bytes"
        return ""

    @property
    def round_id(self) -> int | None:
        """The round that all of them were sent in, 0 if there is none; None where there are no copies."""
        if not self._copies:
            return None
        rounds = {one.round_id for one in self._copies.values()}
        return rounds.pop() if len(rounds) == 1 else 0

    def tell(self, key: Key, slot: Tensor, bucket: Bucket, *, round_id: int, base: int) -> int:
        """Turn the whole bucket in a slot into a message about it, with its header, and keep a copy of the bucket.

        Args:
            slot: [slot_bytes] uint8, zero in the gaps between pieces.
            base: the round against whose bucket it is told; 0 tells it whole.

        Returns:
            The bytes of the slot in use.

        Raises:
            StateError: the copy is not of that round.
        """
        kept = self._copies.get(key)
        if kept is None or (base and kept.round_id != base):
            raise StateError(f"this sender has kept no bucket {key[2]} of round {base}; call keep_sent() first")
        whole = slot[ALIGNMENT : bucket.nbytes]
        total = checksum(whole)
        header = BucketHeader(round_id, key[2], bucket.nbytes, base, bucket.nbytes)
        data = kept.data.to(self._torch_device)
        if base:
            encoding, count, message = encode(data, whole, word_of(bucket.dtypes))
            used = ALIGNMENT + message.numel()
            header = header._replace(encoding=encoding, num_changed=count, message_bytes=used)
            data.copy_(whole)
            whole[: message.numel()].copy_(message)
        else:
            data.copy_(whole)
        self._copies[key] = _SentCopy(data, round_id)
        header.write(slot, total)
        return header.message_bytes

    def leave_device(self) -> None:
        """Move them to the host; each comes back when its bucket is sent again."""
        if not self._device.spec.is_host:
            self._copies = {key: one._replace(data=one.data.cpu()) for key, one in self._copies.items()}

    def drop(self) -> None:
        self._copies = {}
