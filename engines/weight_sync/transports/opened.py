"""What a receiver has open of a sender in another process: blocks of memory, and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlcore.engines.weight_sync.planning.manifest import dtype_of
from rlcore.engines.weight_sync.sender import Offer, Offered
from rlcore.errors import SyncError
from rlcore.types import IpcHandle


class Opened:
    """Of one sender, until it takes the memory back or ``close`` is called."""

    def __init__(self, offer: Offer, open_handles: Callable[[Sequence[IpcHandle]], list[Any]]) -> None:
        self._mappings = open_handles(offer.handles or ())
        try:
            self._tensors = _parts([mapping.tensor for mapping in self._mappings], offer.tensors)
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


def _parts(blocks: Sequence[Tensor], offered: Sequence[Offered]) -> dict[int, Tensor]:
    """By number, [numel] each, made by one operation of torch: they are many."""
    typed: dict[tuple[int, str], Tensor] = {}
    found = {}
    for one in offered:
        key = one.handle, one.dtype
        if key not in typed:
            typed[key] = _typed(blocks[one.handle], one.dtype)
        block = typed[key]
        itemsize = block.element_size()
        first, beside = divmod(one.offset_bytes, itemsize)
        if first < 0 or beside or first + one.numel > block.numel():
            raise SyncError(
                f"a tensor of {one.numel} {one.dtype} was offered at byte {one.offset_bytes} of a block of "
                f"{blocks[one.handle].numel()}"
            )
        found[one.number] = block.as_strided((one.numel,), (1,), block.storage_offset() + first)
    return found


def _typed(block: Tensor, dtype: str) -> Tensor:
    kind = dtype_of(dtype)
    return block[: block.numel() // kind.itemsize * kind.itemsize].view(kind)
