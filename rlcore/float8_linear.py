"""Linear layers whose three products are of float8, with a scale for each row and column.

    y = x W^T      dx = dy W      dW = dy^T x

Both operands of a product are rounded to e4m3 along the dimension that is summed over: each row of the first and each
column of the second is divided by its own largest magnitude over 448. Sums are in float32, and the result is bfloat16.
The weight that the optimizer steps is never rounded. Gradients of the output are e4m3, too: with a scale for each row
their range is that of one token or one feature, which e5m2 would spend three bits of precision for.

Compiled code fuses the roundings with their neighbours. Eager code makes a pass over memory for each, which costs more
than the products save.

Letters: M rows (tokens), K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlcore._torch_private import scaled_product
from rlcore.errors import UnsupportedError, first_line

_DTYPE = torch.float8_e4m3fn
_GREATEST = 448.0
_LEAST_SCALE = 2.0**-120
"""The scale of a row of zeros."""
_MULTIPLE = 16
"""Sizes of float8 products are multiples of it. Rows of zeros make up what a batch of tokens lacks."""
_FEWEST_FEATURES = 256
"""Layers with fewer are left alone: routers and adapters, which are sensitive, and whose products take no time."""


def use_float8(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Let the linear layers of ``blocks`` multiply in float8 while they compute in bfloat16.

    Raises:
        UnsupportedError: the device has no such products, or there is no layer that could use them.
    """
    if reason := refusal(device):
        raise UnsupportedError(f"compute_dtype='float8' on {device}", reason)
    layers = [layer for block in blocks for layer in block.modules() if _is_suitable(layer)]
    if not layers:
        raise UnsupportedError(
            "compute_dtype='float8' of this module",
            f"no torch.nn.Linear inside the blocks that wrap_classes() names has sizes of at least {_FEWEST_FEATURES} "
            f"that are multiples of {_MULTIPLE}; use compute_dtype='bfloat16'",
        )
    for layer in layers:
        layer.__class__ = Float8Linear


def refusal(device: torch.device) -> str | None:
    """Return why the device cannot multiply so, or None. It is asked by one small product."""
    ones = torch.ones(_MULTIPLE, _MULTIPLE, dtype=torch.bfloat16, device=device)
    try:
        product = _product(*_rounded(ones, 1), *_rounded(ones, 1))
        is_right = bool((product == _MULTIPLE).all())
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"it has no product of float8 with scales of rows ({first_line(error)}); use compute_dtype='bfloat16'"
    return None if is_right else "its product of float8 with scales of rows is wrong; use compute_dtype='bfloat16'"


def _is_suitable(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear:
        return False
    sizes = layer.in_features, layer.out_features
    return min(sizes) >= _FEWEST_FEATURES and not any(size % _MULTIPLE for size in sizes)


class Float8Linear(nn.Linear):
    """A linear layer that multiplies bfloat16 in float8, and any other dtype as it is."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
            return functional.linear(x, weight, bias)
        y: Tensor = _Float8Product.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return _product(*_rounded(x_MK, 1), *_rounded(weight_NK, 1))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, weight_NK = ctx.saved_tensors
        (dy_MN,) = grad_output
        dx_MK = dw_NK = None
        if ctx.needs_input_grad[0]:
            dx_MK = _product(*_rounded(dy_MN, 1), *_rounded(weight_NK.T, 1))
        if ctx.needs_input_grad[1]:
            dw_NK = _product(*_rounded(_whole_rows(dy_MN).T, 1), *_rounded(_whole_rows(x_MK).T, 1))
        return dx_MK, dw_NK


def _whole_rows(x_MK: Tensor) -> Tensor:
    """Return ``x_MK`` with rows of zeros up to a multiple of 16."""
    return functional.pad(x_MK, (0, 0, 0, -x_MK.shape[0] % _MULTIPLE))


def _rounded(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``x`` as contiguous float8, and the float32 scales along ``dim`` by which it has been divided."""
    scale = (x.abs().amax(dim, keepdim=True).float() / _GREATEST).clamp(min=_LEAST_SCALE)
    return (x.float() / scale).to(_DTYPE).contiguous(), scale.contiguous()


def _product(a_MK: Tensor, scale_M1: Tensor, b_NK: Tensor, scale_N1: Tensor) -> Tensor:
    """Return a b^T in bfloat16."""
    return scaled_product(a_MK, b_NK.T, scale_M1, scale_N1.T)
