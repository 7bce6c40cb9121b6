"""The rows of a router, which are the packed tokens that a model computes, as it may have laid them out.

Letters: T packed tokens, R rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad


def rows_of(values_T: Tensor, cu_seqlens: Tensor, num_rows: int, *, fill: int) -> Tensor | None:
    """Return [R, ...] the values of so many rows: of packed tokens, of packed tokens and padding, or of padded rows.

    None means that the rows are laid out in none of these ways, such as by a model that computes a part of the tokens.

    Args:
        values_T: [T, ...], of each token.
        cu_seqlens: [N + 1], on the host: where the sequences begin, should they run padded.
        fill: the value of padding.
    """
    missing = num_rows - len(values_T)
    if not missing:
        return values_T
    lengths = cu_seqlens.diff().tolist()
    if num_rows == len(lengths) * max(lengths):
        parts = list(torch.split(values_T, lengths))
        return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill).flatten(0, 1)
    if 0 < missing < _num_ranks():  # ranks that share a row pad it, so that it divides
        return pad(values_T, (*(0, 0) * (values_T.dim() - 1), 0, missing), value=fill)
    return None


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
