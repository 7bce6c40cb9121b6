"""Attention within packed sequences by the vendor's operator, registered for the train engine.

Declared: the operator's schema is compared with the wheels, and the call ran on a simulation of its description. On an
NPU it is chosen only if its results are those of plain torch (``rlcore.packed.choice`` tries it).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlcore.packed.attention_call import AttentionCall
    from rlcore.packed.implementations import PackedSequences

_CAUSAL, _BAND = 3, 4
"""Values of sparse_mode: both take the mask below for all lengths."""
_MASK_SIZE = 2048


def fusion_lacks(call: AttentionCall, device: torch.device) -> str | None:
    absent = {
        "softcap": call.softcap is not None,
        "sinks": call.has_sinks,
        "dropout": call.has_dropout,
        "values of another width than the keys": call.value_dim != call.head_dim,
    }
    asked = [feature for feature, is_asked in absent.items() if is_asked]
    return f"it is used without {' and '.join(asked)}" if asked else None


def attend_fusion(
    module: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, **options: Any
) -> Tensor:
    """Return [1, T, heads, D]. The lengths are on the host, so that nothing waits for the device."""
    from rlcore.packed.implementations import cast_alike  # imports transformers

    queries_TND, keys_TND, values_TND = (x[0].transpose(0, 1).contiguous() for x in cast_alike(query, key, value))
    window = options.get("sliding_window")
    result: Tensor = torch.ops.npu.npu_fusion_attention(
        queries_TND,
        keys_TND,
        values_TND,
        query.shape[1],
        "TND",
        atten_mask=_mask(query.device),
        scale=options["scaling"],
        pre_tockens=2147483647 if window is None else window - 1,
        next_tockens=0,
        actual_seq_qlen=packed.ends,
        actual_seq_kvlen=packed.ends,
        sparse_mode=_CAUSAL if window is None else _BAND,
    )[0]
    return result[None]


@functools.cache
def _mask(device: torch.device) -> Tensor:
    """Return the mask, True where attention is not allowed: one triangle, of which the operator takes a part."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu(1)
