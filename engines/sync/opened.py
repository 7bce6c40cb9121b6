"""What a receiver has open of a sender in another process: blocks of memory, and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlcore.engines.sync.sender import Offer
from rlcore.engines.sync.source import dtype_of
from rlcore.errors import SyncError
from rlcore.types import IpcHandle


class Opened:
    """Of one sender, until it takes the memory back or ``close`` is called."""

    def __init__(self, offer: Offer, open_handle: Callable[[IpcHandle], Any]) -> None:
        self._mappings: list[Any] = []
        try:
            for handle in offer.handles or ():
                self._mappings.append(open_handle(handle))
            blocks = [mapping.tensor for mapping in self._mappings]
            self._tensors = {
                one.number: _part(blocks[one.handle], one.offset_bytes, one.numel, one.dtype) for one in offer.tensors
            }
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Mapping[int, Tensor]:
        """By number: the rows that the sender has of each parameter, [numel].

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


def _part(block: Tensor, offset_bytes: int, numel: int, dtype: str) -> Tensor:
    kind = dtype_of(dtype)
    end = offset_bytes + numel * kind.itemsize
    if offset_bytes < 0 or end > block.numel():
        raise SyncError(f"a tensor was offered at bytes [{offset_bytes}, {end}) of a block of {block.numel()}")
    return block[offset_bytes:end].view(kind)
