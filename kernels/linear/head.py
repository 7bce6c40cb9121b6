"""The product of hidden states and the output weight, forward and backward, in chunks of rows.

    u = h W^T + b      z = softcap * tanh(u / softcap), or u without a softcap
    du = dz (1 - (z / softcap)^2)      dh = du W      dW = du^T h      db = sum_t du

Products of bfloat16 give float32 directly where the device's matrix units can (``torch.mm(out_dtype=)``); all
others are taken in float32, or float64 for float64 inputs. Either way logits are never rounded, and gradients
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

if TYPE_CHECKING:
    from torch.distributed import Work

    from rlcore.kernels.linear.vocab_shard import VocabularyShard

Totals = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias; None if not asked for."""


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool

    @staticmethod
    def of(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Needs:
        tracked = torch.is_grad_enabled()
        bias_needs = bias_V is not None and bias_V.requires_grad
        return Needs(tracked and hidden_TH.requires_grad, tracked and weight_VH.requires_grad, tracked and bias_needs)


class LinearHead:
    """Logits of chunks of hidden states.

    It holds a float32 copy of a half-precision weight on devices that cannot multiply into float32.
    """

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None, softcap: float | None) -> None:
        self.wide = wide_dtype(weight_VH.dtype)
        is_fused = _multiplies_into_float32(weight_VH.device.type, weight_VH.dtype)
        self.operand = weight_VH.dtype if is_fused else self.wide
        self.weight_VH = weight_VH.detach().to(self.operand)
        self.bias_V = None if bias_V is None else bias_V.detach().to(self.wide)
        self.softcap = softcap

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """[T, V], wide, before logit scale and temperature."""
        logits_TV = self.product(hidden_TH.to(self.operand), self.weight_VH.T)
        if self.bias_V is not None:
            logits_TV.add_(self.bias_V)
        if self.softcap is not None:
            logits_TV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_TV

    def softcap_slope(self, logits_TV: Tensor) -> Tensor | None:
        """dz / du; take it before the logits are overwritten."""
        if self.softcap is None:
            return None
        return (logits_TV / self.softcap).square_().neg_().add_(1)

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(a), b.shape[1], dtype=self.wide, device=a.device)
        if not (a.numel() and b.numel()):  # what torch.mm(out_dtype=) does then is not said
            return out.zero_()
        with self._unlowered():
            if self.operand == self.wide:
                return torch.mm(a, b, out=out)
            return torch.mm(a, b, out_dtype=self.wide, out=out)

    def accumulate(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a b"""
        if not (a.numel() and b.numel()):
            return
        with self._unlowered():
            if self.operand == self.wide:
                total.addmm_(a, b)
            else:
                torch.addmm(total, a, b, out_dtype=self.wide, out=total)

    def _unlowered(self) -> AbstractContextManager[Any]:
        """A backward inside an autocast region must not round these products."""
        return unlowered(self.weight_VH.device.type)


class HeadGradients:
    """The gradients asked for, accumulated over chunks in the wide dtype.

    With a ``shard`` of the vocabulary that of the hidden states is summed over the ranks, while that of the weight is
    computed. A product for that of the hidden states has ``product_rows``, or all of a chunk.
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
        self.weight_VH: Tensor | None = None  # begun by the first chunk, which need not read it
        self.bias_V = torch.zeros(vocab_size, **options) if needs.bias else None

    def add(self, rows: slice, dlogits_TV: Tensor, slope_TV: Tensor | None, hidden_TH: Tensor) -> None:
        """Take in a chunk: its place, the gradient of its logits (overwritten), its hidden states."""
        if slope_TV is not None:
            dlogits_TV.mul_(slope_TV)
        if self.bias_V is not None:
            self.bias_V.add_(dlogits_TV.sum(0, dtype=self._head.wide))
        operand_TV = dlogits_TV.to(self._head.operand)
        if self.hidden_TH is not None:
            chunk_TH = self.hidden_TH[rows]
            for run in row_chunks(len(operand_TV), self._product_rows or max(len(operand_TV), 1)):
                self._head.product(operand_TV[run], self._head.weight_VH, out=chunk_TH[run])
            if self._shard is not None:
                self._sums += self._shard.sums_begun(self.hidden_TH, rows)
        if not self._needs.weight:
            return
        factors = operand_TV.T, hidden_TH.to(self._head.operand)
        if self.weight_VH is None:
            self.weight_VH = self._head.product(*factors)
        else:
            self._head.accumulate(self.weight_VH, *factors)

    def totals(self) -> Totals:
        for work in self._sums:
            work.wait()
        self._sums.clear()
        return self.hidden_TH, self.weight_VH, self.bias_V


def rounded(totals: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Each gradient, in the dtype of its input."""
    pairs = zip(totals, inputs, strict=True)
    return [None if total is None or x is None else total.to(x.dtype) for total, x in pairs]


@functools.cache
def _multiplies_into_float32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this device has a half-precision product with a float32 result that serves gradients too."""
    if dtype != torch.bfloat16:  # in float16 the gradients of logits, often below 6e-8, would vanish
        return False
    probe = torch.ones(16, 16, dtype=dtype, device=device_type)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device_type)
    try:
        torch.addmm(total, probe, probe, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # the two ways in which torch says that a device has no such product
        return False
    return True
