"""The weights that vLLM quantises to float8 while it loads them: ``quantization="fp8_per_tensor"`` and "fp8_per_block".

vLLM's loader takes weights in the model's dtype, and its layers make float8 of them when they have them whole. Whether
what is found here is what they make of them, and in the order in which their kernels want it, the self-test of a plan
tells: what is not, vLLM's loader is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.engines._torch_private import is_compiler_off
from rlcore.errors import InvalidInputError
from rlcore.kernels.strided_copy.quantized import BLOCK, QuantizedMatrices

_WHOLE = ("Fp8PerTensorOnlineLinearMethod", "Fp8PerTensorOnlineMoEMethod")
_BLOCKS = ("Fp8PerBlockOnlineLinearMethod", "Fp8PerBlockOnlineMoEMethod")
_WEIGHTS = ("weight", "w13_weight", "w2_weight")
_SCALES = ("_scale_inv", "_scale")


def quantized_matrices(model: nn.Module, dtype: torch.dtype) -> dict[str, QuantizedMatrices]:
    """Return what vLLM has quantised while it loaded, by the names of the weights.

    Args:
        dtype: the model's, in which vLLM's loader takes weights.
    """
    return dict(_found(model, dtype))


def _found(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, QuantizedMatrices]]:
    for prefix, layer in model.named_modules():
        method = type(getattr(layer, "quant_method", None)).__name__
        if method not in _WHOLE + _BLOCKS:
            continue
        for name in _WEIGHTS:
            matrices = _matrices(layer, name, dtype, is_blockwise=method in _BLOCKS)
            if matrices is not None:
                yield f"{prefix}.{name}", matrices


def _matrices(layer: Any, name: str, dtype: torch.dtype, *, is_blockwise: bool) -> QuantizedMatrices | None:
    weight, scales = getattr(layer, name, None), [getattr(layer, name + end, None) for end in _SCALES]
    scale = next((one for one in scales if isinstance(one, Tensor)), None)
    if not isinstance(weight, Tensor) or weight.dtype != torch.float8_e4m3fn or scale is None:
        return None
    if is_blockwise and list(getattr(layer, "weight_block_size", None) or ()) != [BLOCK, BLOCK]:
        return None
    if weight.ndim == 3:
        count, rows, columns = weight.shape
        lies_by_rows = weight.is_contiguous()
    else:
        count, rows, columns = 1, layer.output_size_per_partition, layer.input_size_per_partition
        lies_by_rows = any(  # a square one may be turned, too
            tuple(one.shape) == (rows, columns) and one.is_contiguous() for one in (weight, weight.t())
        )
    if not lies_by_rows or not scale.is_contiguous():
        return None
    tensors = weight.detach(), scale.detach()
    try:
        return QuantizedMatrices(*tensors, count, rows, columns, is_blockwise, dtype, is_compiler_off())
    except InvalidInputError:  # padded, or with scales of another grid
        return None
