"""The operators, each registered implementation against the others, at the sizes of a training step.

What they return is compared with the definition in float64 on the same inputs, computed in slices of rows.

Letters: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work
from rlcore.bench.cases.kernel_peers import linear_logprob_peers, token_logprob_peers
from rlcore.kernels.linear_logprob import linear_logprob
from rlcore.kernels.linear_loss import linear_loss
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.kernels.rows import Logprobs
from rlcore.kernels.token_logprob import token_logprob
from rlcore.registry import registry

Score = Callable[..., Any]
"""Tensors to (logprob, entropy)"""

_CHECKED_ROWS = 256
"""Rows of float64 logits held at a time, and rows of the [T, V] gradient that are compared."""


@dataclass(frozen=True, slots=True)
class _Size:
    T: int
    V: int
    H: int
    dtype: torch.dtype


_HOST = _Size(256, 32_000, 256, torch.float32)
"""Under a second a run on two cores."""
_ACCELERATOR = _Size(8192, 151_936, 4096, torch.bfloat16)
"""A micro-batch of a Qwen3 8B: 2.5 GB of logits."""
_ACCELERATOR_LOGITS = _Size(16_384, 151_936, 256, torch.bfloat16)
"""Where the logits are there already; H only makes them."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    size: _Size
    hidden_TH: Tensor
    weight_VH: Tensor
    target_T: Tensor

    @classmethod
    def on(cls, device: Any, *, is_logits: bool = False) -> _Inputs:
        size = _HOST if device.spec.is_host else _ACCELERATOR_LOGITS if is_logits else _ACCELERATOR
        device.seed(0)
        at: dict[str, Any] = {"device": device.torch_device}
        # Logits of variance about 4: neither uniform nor decided.
        hidden_TH = torch.randn(size.T, size.H, **at).mul_(2 * size.H**-0.5).to(size.dtype)
        weight_VH = torch.randn(size.V, size.H, **at).to(size.dtype)
        return cls(size, hidden_TH, weight_VH, torch.randint(size.V, (size.T,), **at))

    @property
    def params(self) -> dict[str, int | float | str]:
        dtype = str(self.size.dtype).removeprefix("torch.")
        return {"T": self.size.T, "V": self.size.V, "H": self.size.H, "dtype": dtype}

    def slices(self) -> list[slice]:
        return [slice(start, start + _CHECKED_ROWS) for start in range(0, self.size.T, _CHECKED_ROWS)]

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


def _implementations(op: str, device: Any) -> list[str]:
    return [entry.name for entry in registry().ops[op] if entry.device_type in ("*", device.type)]


def _scorers(op: str, device: Any, call: Callable[..., Any], peers: Mapping[str, Score]) -> dict[str, Score]:
    """Every implementation of the operator, with entropy, and every peer that runs here."""
    ours: dict[str, Score] = {
        name: functools.partial(call, with_entropy=True, implementation=name) for name in _implementations(op, device)
    }
    return ours if device.spec.is_host else {**ours, **peers}


def _assert_scores(output: tuple[Tensor | None, ...], true: Logprobs, dtype: torch.dtype) -> None:
    logprob_T, entropy_T = output[:2]
    assert logprob_T is not None and true.entropy is not None
    rows = slice(0, len(true.logprob))
    # Peers round the logits: wrong is what that does not explain.
    _assert_close("logprob", logprob_T[rows], true.logprob, _tolerance(dtype))
    if entropy_T is not None:
        _assert_close("entropy", entropy_T[rows], true.entropy, _tolerance(dtype))


def _assert_close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within ``tolerance`` of the largest true value; float64 decides."""
    scale = want.abs().max().item()
    torch.testing.assert_close(
        got.double(), want, rtol=0, atol=tolerance * scale, msg=lambda text: f"{name} is wrong: {text}"
    )


def _tolerance(dtype: torch.dtype) -> float:
    """What one rounding of the result to ``dtype`` may cost, and float32 sums over thousands of terms."""
    return max(torch.finfo(dtype).eps, 1e-4)


# -------------------------------------------------------------------------------------------- the three cases


def _prepare_token_logprob(device: Any) -> Work:
    inputs = _Inputs.on(device, is_logits=True)
    size = inputs.size
    logits_TV = (inputs.hidden_TH @ inputs.weight_VH.T).requires_grad_()
    upstream_2T = torch.randn(2, size.T, device=device.torch_device)
    checked = slice(0, _CHECKED_ROWS)
    true_TV = logits_TV.detach()[checked].double().requires_grad_()
    true = token_logprob(true_TV, inputs.target_T[checked], with_entropy=True, implementation="reference")
    assert true.entropy is not None
    (true_gradient_TV,) = torch.autograd.grad(
        [true.logprob, true.entropy], true_TV, list(upstream_2T[:, checked].double())
    )
    true = Logprobs(true.logprob.detach(), true.entropy.detach())

    def contender(name: str, score: Score) -> Contender:
        def run() -> tuple[Tensor, ...]:
            found = score(logits_TV, inputs.target_T)
            return *(x.detach() for x in found), *torch.autograd.grad(found, logits_TV, list(upstream_2T))

        return Contender(implementation=name, run=run, check=check)

    def check(output: tuple[Tensor, ...]) -> None:
        _assert_scores(output, true, size.dtype)
        _assert_close("gradient", output[2][checked], true_gradient_TV, _tolerance(size.dtype))

    scorers = _scorers("token_logprob", device, token_logprob, token_logprob_peers())
    # The logits are read in the forward and in the backward, which writes as much.
    num_bytes = 3 * size.T * size.V * size.dtype.itemsize
    contenders = tuple(contender(*scorer) for scorer in scorers.items())
    return Work(contenders=contenders, params=inputs.params, bytes=num_bytes)


def _prepare_linear_logprob(device: Any) -> Work:
    inputs = _Inputs.on(device)
    size = inputs.size
    true = inputs.true_scores()

    def contender(name: str, score: Score) -> Contender:
        @torch.no_grad()
        def run() -> tuple[Tensor | None, ...]:
            return tuple(score(inputs.hidden_TH, inputs.weight_VH, inputs.target_T))

        return Contender(implementation=name, run=run, check=lambda output: _assert_scores(output, true, size.dtype))

    scorers = _scorers("linear_logprob", device, linear_logprob, linear_logprob_peers())
    return Work(
        contenders=tuple(contender(*scorer) for scorer in scorers.items()),
        params=inputs.params,
        flops=2 * size.T * size.V * size.H,
        bytes=(size.T + size.V) * size.H * size.dtype.itemsize,
    )


def _prepare_linear_loss(device: Any) -> Work:
    inputs = _Inputs.on(device)
    size = inputs.size
    loss_fn = ppo_clip()
    per_token = {
        # Within the clip range, where the loss is smooth: rounding cannot switch a token's gradient off.
        "old_logprobs": (
            inputs.true_scores().logprob + torch.linspace(-0.1, 0.1, size.T).to(device.torch_device)
        ).float(),
        "advantages": torch.randn(size.T, device=device.torch_device),
    }
    token_weight = torch.full((size.T,), 1 / size.T, device=device.torch_device)
    truth = _true_loss_and_gradients(inputs, per_token, token_weight)
    hidden_TH, weight_VH = (x.detach().requires_grad_() for x in (inputs.hidden_TH, inputs.weight_VH))

    def runs(implementation: str) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            loss = linear_loss(
                hidden_TH,
                weight_VH,
                inputs.target_T,
                loss_fn,
                per_token=per_token,
                token_weight=token_weight,
                with_entropy=False,
                implementation=implementation,
            ).loss
            return loss.detach(), *torch.autograd.grad(loss, (hidden_TH, weight_VH))

        return run

    def check(output: tuple[Tensor, ...]) -> None:
        for name, got, want in zip(("loss", "hidden gradient", "weight gradient"), output, truth, strict=True):
            _assert_close(name, got, want, _tolerance(size.dtype))

    names = _implementations("linear_loss", device)
    return Work(
        contenders=tuple(Contender(implementation=name, run=runs(name), check=check) for name in names),
        params=inputs.params,
        flops=6 * size.T * size.V * size.H,
        bytes=2 * (size.T + size.V) * size.H * size.dtype.itemsize,
    )


def _true_loss_and_gradients(
    inputs: _Inputs, per_token: dict[str, Tensor], token_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """In float64, a slice of tokens at a time: the loss is a sum over tokens."""
    hidden_TH = inputs.hidden_TH.double().requires_grad_()
    weight_VH = inputs.weight_VH.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=hidden_TH.device)
    for rows in inputs.slices():
        loss = linear_loss(
            hidden_TH[rows],
            weight_VH,
            inputs.target_T[rows],
            ppo_clip(),
            per_token={name: values[rows].double() for name, values in per_token.items()},
            token_weight=token_weight[rows],
            with_entropy=False,
            implementation="reference",
        ).loss
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    assert hidden_TH.grad is not None and weight_VH.grad is not None
    return total, hidden_TH.grad, weight_VH.grad


token_logprob_case = Case(
    name="kernels/token_logprob",
    description="log-probabilities of the targets and entropies from logits, forward and backward",
    prepare=_prepare_token_logprob,
)
linear_logprob_case = Case(
    name="kernels/linear_logprob",
    description="log-probabilities of the targets and entropies from hidden states, forward",
    prepare=_prepare_linear_logprob,
)
linear_loss_case = Case(
    name="kernels/linear_loss",
    description="clipped policy loss from hidden states with both gradients",
    prepare=_prepare_linear_loss,
)
