"""``linear_loss`` at the sizes of training steps, beside the three products that nobody can do without.

Letters: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work
from rlcore.bench.cases.kernel_inputs import HEADS, HeadSize, Inputs, assert_close, implementations
from rlcore.device import Device
from rlcore.kernels.linear.loss import linear_loss
from rlcore.kernels.losses.combine import combine
from rlcore.kernels.losses.gmpo import gmpo
from rlcore.kernels.losses.gspo import gspo
from rlcore.kernels.losses.importance import sequence_mask, tis
from rlcore.kernels.losses.interface import LossFn
from rlcore.kernels.losses.penalty import entropy_bonus, kl
from rlcore.kernels.losses.policy import ppo_clip

_SEQUENCE_TOKENS = 512
_BARE = "bare products"
_LOGITS_ROWS, _WEIGHT_ROWS = 1024, 4096
"""Rows of chunks: of logits and the gradient of hidden states; the gradient of the weight, accumulated in float32."""


def _with_penalties(term: LossFn) -> LossFn:
    return combine(term, kl(coef=0.01), entropy_bonus(coef=0.01))


class _Losses:
    """Inputs of a policy loss within its clip range, where it is smooth: rounding cannot switch a gradient off."""

    def __init__(self, device: Device, size: HeadSize) -> None:
        self.inputs = Inputs.on(device, size)
        size, at = self.inputs.size, device.torch_device
        logprob_T = self.inputs.true_scores().logprob
        # By steps within a sequence whose mean is 0: the ratio of a sequence is 1.
        place_T = torch.arange(size.T, device=at) % _SEQUENCE_TOKENS
        drift_T = (place_T % 2 * 2 - 1) * torch.linspace(0.01, 0.1, size.T, device=at)
        old_T = (logprob_T + drift_T).float()
        self.per_token = {
            "old_logprobs": old_T,
            "ref_logprobs": old_T - drift_T.float() / 2,
            "rollout_logprobs": old_T + 1e-3,
            "advantages": torch.randn(size.T, device=at),
        }
        self.token_weight = torch.full((size.T,), 1 / size.T, device=at)
        self.leaves = self.inputs.leaves()
        self.edges = torch.arange(0, size.T + 1, min(_SEQUENCE_TOKENS, size.T))

    def runs(self, loss_fn: LossFn, implementation: str | None) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            loss = linear_loss(
                *self.leaves,
                self.inputs.target_T,
                loss_fn,
                per_token=self.per_token,
                token_weight=self.token_weight,
                cu_seqlens=self.edges,
                implementation=implementation,
            ).loss
            return loss.detach(), *torch.autograd.grad(loss, self.leaves)

        return run

    def work(self, contenders: list[Contender]) -> Work:
        size = self.inputs.size
        return Work(
            tuple(contenders),
            self.inputs.params,
            flops=6 * size.T * size.V * size.H,
            bytes=2 * (size.T + size.V) * size.H * size.dtype.itemsize,
            runs_on="stream",
        )


def _prepare_loss(device: Device, *, size: HeadSize) -> Work:
    losses = _Losses(device, size)
    loss_fn, dtype = _with_penalties(ppo_clip()), losses.inputs.size.dtype
    truth = losses.inputs.true_gradients(loss_fn, losses.per_token, losses.token_weight)
    truth = tuple(x.to(torch.float32) for x in truth)  # type: ignore[assignment]

    def check(output: tuple[Tensor, ...]) -> None:
        for name, got, want in zip(("loss", "hidden gradient", "weight gradient"), output, truth, strict=True):
            assert_close(name, got, want, dtype)

    names = implementations("linear_loss", device)
    contenders = [Contender(x, losses.runs(loss_fn, x), check) for x in names]
    if not device.spec.is_host:
        contenders.append(Contender(_BARE, _bare_products(losses.inputs), lambda _: None))
    return losses.work(contenders)


def _bare_products(inputs: Inputs) -> Callable[[], None]:
    """The device's own, on numbers like those of a training step; what they give means nothing."""
    size, hidden_TH, weight_VH = inputs.size, inputs.hidden_TH, inputs.weight_VH
    room_TV = torch.randn(min(size.T, _WEIGHT_ROWS), size.V, device=hidden_TH.device, dtype=size.dtype)
    hidden_gradient_TH = torch.empty_like(hidden_TH)
    weight_gradient_VH = torch.zeros_like(weight_VH, dtype=torch.float32)

    def run() -> None:
        for start in range(0, size.T, _LOGITS_ROWS):
            rows, room = slice(start, start + _LOGITS_ROWS), room_TV[start % len(room_TV) :][:_LOGITS_ROWS]
            torch.mm(hidden_TH[rows], weight_VH.T, out=room)
            torch.mm(room, weight_VH, out=hidden_gradient_TH[rows])
        for start in range(0, size.T, _WEIGHT_ROWS):
            rows = slice(start, start + _WEIGHT_ROWS)
            torch.addmm(weight_gradient_VH, room_TV.T, hidden_TH[rows], out_dtype=torch.float32, out=weight_gradient_VH)

    return run


def _prepare_sequences(device: Device, *, size: HeadSize) -> Work:
    losses = _Losses(device, size)
    terms = {
        "grpo": ppo_clip(),
        "gspo": gspo(clip_low=0.2, clip_high=0.28),
        "gmpo": gmpo(),
        "sequence-masked tis": sequence_mask(tis(ppo_clip()), low=0.9, high=1.1),
    }

    def contender(name: str, loss_fn: LossFn) -> Contender:
        few = slice(0, 4 * _SEQUENCE_TOKENS)
        want = None if device.spec.is_host else losses.runs(loss_fn, "rows")()

        def check(output: tuple[Tensor, ...]) -> None:
            """Against float32 logits read by other kernels; on a host there is but one way to run."""
            assert all(bool(x.isfinite().all()) for x in output)
            if want is not None:
                assert_close("loss", output[0], want[0], torch.bfloat16)
                assert_close("hidden gradient", output[1][few], want[1][few], torch.bfloat16)

        return Contender(name, losses.runs(loss_fn, None), check)

    return losses.work([contender(name, _with_penalties(term)) for name, term in terms.items()])


def _loss_case(head: str) -> Case:
    return Case(
        f"kernels/linear_loss/{head}",
        f"clipped policy loss with k3 and entropy terms of a {head.upper()} model, both gradients",
        functools.partial(_prepare_loss, size=HEADS[head]),
    )


def _sequences_case(head: str) -> Case:
    return Case(
        f"kernels/linear_loss_sequences/{head}",
        f"losses of sequences beside GRPO, with k3 and entropy terms, of a {head.upper()} model",
        functools.partial(_prepare_sequences, size=HEADS[head]),
    )


cases = (*map(_loss_case, HEADS), *map(_sequences_case, HEADS))
