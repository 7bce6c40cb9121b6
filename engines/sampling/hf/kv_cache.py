"""A layer's keys and values that grow in blocks.

transformers' own layer copies the whole cache at every step, into memory one column larger each time. This one writes
new columns in place and copies when its block is full. Measured on one thread of a shared CPU
(256 rows, 3 layers of 2 heads of 64, fp32, 150 new tokens): 2.5 s of processor time instead of 3.8 s, and 38 thousand
page faults instead of 207 thousand.

Legend: B = rows, H = key-value heads, L = cached columns, D = head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

_MIN_BLOCK = 32
_GROWTH = 4  # a block is at least a quarter of what is cached, so that growing costs each column four copies at most


class BlockLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """A cache layer that continues a filled ``DynamicLayer``."""

    def __init__(self, filled: Any, *, max_new_columns: int) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self.keys, self.values = filled.keys, filled.values
        self._num_expected = max_new_columns
        self._num_free = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, L', D] keys and values; return views of the whole cache."""
        start, num_new = self.keys.shape[2], key_states.shape[2]
        if self._num_free < num_new:
            self._grow(num_new)
        end = start + num_new
        self._key_BHLD[:, :, start:end] = key_states
        self._value_BHLD[:, :, start:end] = value_states
        self._num_free -= num_new
        self._num_expected -= num_new
        self.keys, self.values = self._key_BHLD[:, :, :end], self._value_BHLD[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, without free columns."""
        super().reorder_cache(beam_idx)
        self._num_free = 0

    def _grow(self, num_new: int) -> None:
        block = max(_MIN_BLOCK, self.keys.shape[2] // _GROWTH)
        self._num_free = max(num_new, min(block, self._num_expected))
        self._key_BHLD = pad(self.keys, (0, 0, 0, self._num_free))
        self._value_BHLD = pad(self.values, (0, 0, 0, self._num_free))


def grow_in_blocks(cache: Any, *, max_new_columns: int) -> None:
    """Replace the layers of a filled cache that keep all columns; sliding windows and states stay as they are."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = BlockLayer(layer, max_new_columns=max_new_columns)
