"""Inputs of the kernel cases, and what is true of them: the definition in float64, computed in slices of rows.

Letters: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Quantity
from rlcore.device import Device
from rlcore.errors import UnsupportedError
from rlcore.kernels.linear.logprob import linear_logprob
from rlcore.kernels.linear.loss import linear_loss
from rlcore.kernels.losses.interface import LossFn
from rlcore.kernels.softmax_rows import Logprobs
from rlcore.registry import registry
from rlcore.tensor_data import dtype_name

CHECKED_ROWS = 256
"""Rows of float64 logits held at a time, and rows of a [T, V] gradient that are compared."""


@dataclass(frozen=True, slots=True)
class HeadSize:
    T: int
    V: int
    H: int
    dtype: torch.dtype


HOST = HeadSize(256, 16_000, 256, torch.float32)
"""The size on a host, where a run takes under a second on two cores. It replaces the first of the sizes below."""
HEADS = {
    "8b": HeadSize(8192, 151_936, 4096, torch.bfloat16),
    "0.5b": HeadSize(32_768, 151_936, 896, torch.bfloat16),
    "14b": HeadSize(4096, 152_064, 5120, torch.bfloat16),
    "1.7b": HeadSize(65_536, 151_936, 2048, torch.bfloat16),
}
"""Output heads of Qwen models by their number of parameters, under micro-batches that such models are given."""
SHAPES = {
    "short": HeadSize(2048, 151_936, 4096, torch.bfloat16),
    "small_vocabulary": HeadSize(16_384, 32_000, 1024, torch.bfloat16),
    "long": HeadSize(24_576, 151_936, 2048, torch.bfloat16),
}
"""Output heads at which something else than the product counts: the host, the exponentials, the sums over rows."""
LOGITS = HeadSize(16_384, 151_936, 256, torch.bfloat16)
"""The size of operators on logits; H is only used to make the logits."""
MORE_LOGITS = {
    "float32": HeadSize(8192, 32_000, 256, torch.float32),
    "128k": HeadSize(12_000, 128_256, 256, torch.bfloat16),
}
"""Others: wide elements, and a vocabulary of another model."""
ACCURACY = HeadSize(1024, 151_936, 2048, torch.bfloat16)
_OF_SEVERAL_RANKS = "vocab_parallel"


def size_on(device: Device, size: HeadSize) -> HeadSize:
    if not device.spec.is_host:
        return size
    if size not in (HEADS["8b"], LOGITS, ACCURACY):
        raise UnsupportedError("this size of the case on cpu", "it is for accelerators; the first one has a small size")
    return HOST


@dataclass(frozen=True, slots=True)
class Inputs:
    size: HeadSize
    hidden_TH: Tensor
    weight_VH: Tensor
    target_T: Tensor

    @classmethod
    def on(cls, device: Device, size: HeadSize, *, deviation: float = 2.0) -> Inputs:
        """Logits of this standard deviation: with 2, neither uniform nor decided."""
        size = size_on(device, size)
        device.seed(0)
        at: dict[str, Any] = {"device": device.torch_device}
        hidden_TH = torch.randn(size.T, size.H, **at).mul_(deviation * size.H**-0.5).to(size.dtype)
        weight_VH = torch.randn(size.V, size.H, **at).to(size.dtype)
        return cls(size, hidden_TH, weight_VH, torch.randint(size.V, (size.T,), **at))

    @property
    def params(self) -> dict[str, int | float | str]:
        dtype = dtype_name(self.size.dtype)
        return {"T": self.size.T, "V": self.size.V, "H": self.size.H, "dtype": dtype}

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden_TH.detach().requires_grad_(), self.weight_VH.detach().requires_grad_()

    def slices(self) -> list[slice]:
        return [slice(start, start + CHECKED_ROWS) for start in range(0, self.size.T, CHECKED_ROWS)]

    def true_scores(self) -> Logprobs:
        weight_VH = self.weight_VH.double()
        parts = [
            linear_logprob(
                self.hidden_TH[rows].double(),
                weight_VH,
                self.target_T[rows],
                with_entropy=True,
                implementation="reference",
            )
            for rows in self.slices()
        ]
        return Logprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def true_gradients(
        self, loss_fn: LossFn, per_token: Mapping[str, Tensor], token_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a loss that is a sum over tokens, and its gradients for hidden states and weight."""
        hidden_TH, weight_VH = (x.double().requires_grad_() for x in (self.hidden_TH, self.weight_VH))
        total = torch.zeros((), dtype=torch.float64, device=hidden_TH.device)
        for rows in self.slices():
            loss = linear_loss(
                hidden_TH[rows],
                weight_VH,
                self.target_T[rows],
                loss_fn,
                per_token={name: values[rows].double() for name, values in per_token.items()},
                token_weight=token_weight[rows],
                implementation="reference",
            ).loss
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        assert hidden_TH.grad is not None and weight_VH.grad is not None
        return total, hidden_TH.grad, weight_VH.grad


def implementations(op: str, device: Device) -> list[str]:
    """Return those registered for one rank of the device; on an accelerator not "reference", which has all logits."""
    names = [entry.name for entry in registry().ops[op] if entry.device_type in ("*", device.type)]
    left_out = {_OF_SEVERAL_RANKS} if device.spec.is_host else {_OF_SEVERAL_RANKS, "reference"}
    return [name for name in names if name not in left_out]


def assert_close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Raise AssertionError if ``got`` differs by more than one rounding to ``dtype``, relative to the largest value."""
    scale = want.abs().max().item()
    tolerance = max(torch.finfo(dtype).eps, 1e-4)
    torch.testing.assert_close(
        got.double(), want.double(), rtol=0, atol=tolerance * scale, msg=lambda text: f"{name} is wrong: {text}"
    )


def assert_scores(output: tuple[Tensor | None, ...], true: Logprobs, dtype: torch.dtype) -> None:
    """Compare scores with the truth; peers round the logits to ``dtype``, which is no error."""
    logprob_T, entropy_T = output[:2]
    assert logprob_T is not None and true.entropy is not None
    rows = slice(0, min(len(true.logprob), len(logprob_T)))
    assert_close("logprob", logprob_T[rows], true.logprob[rows], dtype)
    if entropy_T is not None:
        assert_close("entropy", entropy_T[rows], true.entropy[rows], dtype)


def greatest(got: Tensor, want: Tensor) -> Quantity:
    """Return the greatest absolute error."""
    return Quantity(max(float((got.double() - want).abs().max()), 1e-30), "1")


def relative(got: Tensor, want: Tensor) -> Quantity:
    return Quantity(max(float((got.double() - want).norm() / want.norm()), 1e-30), "1")
