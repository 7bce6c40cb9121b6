"""The product of hidden states and the output weight, forward and backward, in chunks of rows.

    u = h W^T + b      z = softcap * tanh(u / softcap), or u without a softcap
    du = dz (1 - (z / softcap)^2)      dh = du W      dW = du^T h      db = sum_t du

Products of bfloat16 give float32 directly where the device's matrix units can do so (``torch.mm(out_dtype=)``). All
others are computed in float32, or in float64 for float64 inputs. In both cases logits are never rounded, and gradients
of the weight accumulate in float32 (float64 for float64 inputs).

Letters: T rows of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlcore.kernels.chunks import row_chunks
from rlcore.kernels.operands import unlowered
from rlcore.kernels.softmax_rows import wide_dtype
from rlcore.planned import PlannedDevice, planned_device

if TYPE_CHECKING:
    from torch.distributed import Work

    from rlcore.kernels.vocab_shard import VocabularyShard

_FLOAT32_PRODUCT_ARCH = 80
"""The first architecture of NVIDIA whose libraries multiply bfloat16 into float32."""
Totals = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias; None where not asked for."""


class Needs(NamedTuple):
    """The gradients that are asked for."""

    hidden: bool
    weight: bool
    bias: bool

    @staticmethod
    def of(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Needs:
        tracked = torch.is_grad_enabled()
        bias_needs = bias_V is not None and bias_V.requires_grad
        return Needs(tracked and hidden_TH.requires_grad, tracked and weight_VH.requires_grad, tracked and bias_needs)


class LinearHead:
    """The logits of chunks of hidden states.

    It holds a float32 copy of a half-precision weight on devices that cannot multiply into float32.
    """

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None, softcap: float | None) -> None:
        self.wide = wide_dtype(weight_VH.dtype)
        device = weight_VH.device
        is_fused = _multiplies_into_float32(device.type, weight_VH.dtype, planned_device(device))
        self.operand = weight_VH.dtype if is_fused else self.wide
        self.weight_VH = weight_VH.detach().to(self.operand)
        self.bias_V = None if bias_V is None else bias_V.detach().to(self.wide)
        self.softcap = softcap

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Return [T, V] logits, wide, before logit scale and temperature."""
        logits_TV = self.product(hidden_TH.to(self.operand), self.weight_VH.T)
        if self.bias_V is not None:
            logits_TV.add_(self.bias_V)
        return capped_(logits_TV, self.softcap)

    def softcap_derivative(self, logits_TV: Tensor) -> Tensor | None:
        """Return dz / du, or None without a softcap; call it before the logits are overwritten."""
        if self.softcap is None:
            return None
        return (logits_TV / self.softcap).square_().neg_().add_(1)

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(a), b.shape[1], dtype=self.wide, device=a.device)
        if not (a.numel() and b.numel()):  # torch does not document torch.mm(out_dtype=) of nothing
            return out.zero_()
        with self._in_own_dtype():
            if self.operand == self.wide:
                return torch.mm(a, b, out=out)
            return torch.mm(a, b, out_dtype=self.wide, out=out)

    def accumulate(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a b to ``total``, in place."""
        if not (a.numel() and b.numel()):
            return
        with self._in_own_dtype():
            if self.operand == self.wide:
                total.addmm_(a, b)
            else:
                torch.addmm(total, a, b, out_dtype=self.wide, out=total)

    def _in_own_dtype(self) -> AbstractContextManager[Any]:
        """Keep autocast from rounding these products: a backward may run inside an autocast region."""
        return unlowered(self.weight_VH.device.type)


def capped_(logits_TV: Tensor, softcap: float | None) -> Tensor:
    """Return softcap tanh(u / softcap), in place; u itself for no softcap."""
    return logits_TV if softcap is None else logits_TV.div_(softcap).tanh_().mul_(softcap)


class HeadGradients:
    """The gradients asked for, accumulated over chunks in the wide dtype.

    With a ``shard`` of the vocabulary the gradient of the hidden states is summed over the ranks, while that of the
    weight is computed. Each product for the hidden states has ``product_rows`` rows, or all of a chunk.
    """

    def __init__(
        self,
        head: LinearHead,
        needs: Needs,
        num_rows: int,
        shard: VocabularyShard | None = None,
        product_rows: int | None = None,
    ) -> None:
        self._head, self._needs, self._shard, self._product_rows = head, needs, shard, product_rows
        self._sums: list[Work] = []
        options: Any = {"dtype": head.wide, "device": head.weight_VH.device}
        vocab_size, hidden_size = head.weight_VH.shape
        self.hidden_TH = torch.empty(num_rows, hidden_size, **options) if needs.hidden else None
        self.weight_VH: Tensor | None = None  # the first chunk writes it, and need not read it
        self.bias_V = torch.zeros(vocab_size, **options) if needs.bias else None

    def add(self, rows: slice, dlogits_TV: Tensor, derivative_TV: Tensor | None, hidden_TH: Tensor) -> None:
        """Add a chunk: its rows, the gradient of its logits (overwritten), their dz / du, its hidden states."""
        if derivative_TV is not None:
            dlogits_TV.mul_(derivative_TV)
        if self.bias_V is not None:
            self.bias_V.add_(dlogits_TV.sum(0, dtype=self._head.wide))
        operand_TV = dlogits_TV.to(self._head.operand)
        if self.hidden_TH is not None:
            chunk_TH = self.hidden_TH[rows]
            for run in row_chunks(len(operand_TV), self._product_rows or max(len(operand_TV), 1)):
                self._head.product(operand_TV[run], self._head.weight_VH, out=chunk_TH[run])
            if self._shard is not None:
                self._sums += self._shard.start_sums(self.hidden_TH, rows)
        if not self._needs.weight:
            return
        factors = operand_TV.T, hidden_TH.to(self._head.operand)
        if self.weight_VH is None:
            self.weight_VH = self._head.product(*factors)
        else:
            self._head.accumulate(self.weight_VH, *factors)

    def totals(self) -> Totals:
        """Return the sums over all chunks, once those over the ranks are complete."""
        for work in self._sums:
            work.wait()
        self._sums.clear()
        return self.hidden_TH, self.weight_VH, self.bias_V


def rounded(totals: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return each gradient in the dtype of its input."""
    pairs = zip(totals, inputs, strict=True)
    return [None if total is None or x is None else total.to(x.dtype) for total, x in pairs]


@functools.cache
def _multiplies_into_float32(device_type: str, dtype: torch.dtype, planned: PlannedDevice | None) -> bool:
    """Return True if this device has a half-precision product with a float32 result that serves gradients too."""
    if dtype != torch.bfloat16:  # in float16 the gradients of logits, often below 6e-8, would vanish
        return False
    if planned is not None:
        return planned.arch >= _FLOAT32_PRODUCT_ARCH
    probe = torch.ones(16, 16, dtype=dtype, device=device_type)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device_type)
    try:
        torch.addmm(total, probe, probe, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # torch raises one of the two where a device has no such product
        return False
    return True
