"""Log-probabilities from logits and from hidden states: each registered implementation against the others and peers.

``linear_loss`` runs at the sizes of training steps, beside the three matrix products that every implementation must do.

Letters: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work
from rlcore.bench.cases.kernel_inputs import (
    ACCURACY,
    CHECKED_ROWS,
    HEADS,
    LOGITS,
    MORE_LOGITS,
    SHAPES,
    HeadSize,
    Inputs,
    assert_close,
    assert_scores,
    greatest,
    implementations,
    relative,
)
from rlcore.bench.plugin import PEERS
from rlcore.device import Device
from rlcore.kernels.linear.logprob import linear_logprob
from rlcore.kernels.linear.loss import linear_loss
from rlcore.kernels.losses.combine import combine
from rlcore.kernels.losses.gmpo import gmpo
from rlcore.kernels.losses.gspo import gspo
from rlcore.kernels.losses.importance import sequence_mask, tis
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput
from rlcore.kernels.losses.penalty import entropy_bonus, kl
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.kernels.softmax_rows import Logprobs
from rlcore.kernels.token.logprob import token_logprob

_Output = tuple[Tensor | None, ...]
Score = Callable[..., tuple[Tensor, Tensor | None]]
"""Takes (logits, targets) or (hidden, weight, targets), and returns the log-probability and, if it can, the entropy."""

_SIZES = HEADS | SHAPES
_SEQUENCE_TOKENS = 512
_BARE, _BARE_FORWARD = "bare products", "bare product"
_LOGITS_ROWS, _WEIGHT_ROWS = 1024, 4096
"""Rows of chunks: of logits and the gradient of hidden states; the gradient of the weight, accumulated in float32."""
_LEAST_MEMORY, _LOW_MEMORY, _USUAL_MEMORY = 3 * 2**30 // 10, 2**29, 2**30
"""The first is what a budget that nobody gave falls to, from the third, where the device is short of memory."""
_KEEPING = 3 * 2**30
"""Holds the exponentials of all rows of the 8B and 14B heads, so that the backward need not make them again."""


def _scorers(op: str, device: Device, call: Any, *, backward: bool = True) -> dict[str, Score]:
    """Return the contenders of an operator: those registered and, in a checkout, those of other libraries."""
    found: dict[str, Score] = {
        name: functools.partial(call, with_entropy=True, implementation=name) for name in implementations(op, device)
    }
    if PEERS.is_dir() and not device.spec.is_host:
        peers = importlib.import_module("rlcore.bench.cases.peers.operators")
        found |= peers.PEERS[op](with_gradients=backward)
    return found


def _scored(
    score: Score, leaves: tuple[Tensor, ...], target_T: Tensor, grad_output_2T: Tensor, backward: bool
) -> _Output:
    """Return log-probability, entropy or None, and with ``backward`` the gradients of the leaves."""
    with torch.set_grad_enabled(backward):
        found = [x for x in score(*leaves, target_T) if x is not None]
        gradients: _Output = ()
        if backward:
            grad_output = [g_T.to(x.dtype) for g_T, x in zip(grad_output_2T, found, strict=False)]
            gradients = torch.autograd.grad(found, leaves, grad_output)
    return *(*(x.detach() for x in found), None)[:2], *gradients


# ------------------------------------------------------------------------------------------------ from logits


def _prepare_token_logprob(device: Device, *, size: HeadSize, backward: bool) -> Work:
    inputs = Inputs.on(device, size)
    size = inputs.size
    logits_TV = (inputs.hidden_TH @ inputs.weight_VH.T).requires_grad_(backward)
    grad_output_2T = torch.randn(2, size.T, device=device.torch_device)
    checked = slice(0, CHECKED_ROWS)
    true_TV = logits_TV.detach()[checked].double().requires_grad_()
    found = token_logprob(true_TV, inputs.target_T[checked], with_entropy=True, implementation="reference")
    assert found.entropy is not None
    true = Logprobs(found.logprob.detach(), found.entropy.detach())
    outputs, grad_output = [found.logprob, found.entropy], list(grad_output_2T[:, checked].double())
    # of what has no entropy, and of what has one
    true_gradients = [
        torch.autograd.grad(outputs[:count], true_TV, grad_output[:count], retain_graph=True)[0] for count in (1, 2)
    ]

    def contender(name: str, score: Score) -> Contender:
        return Contender(name, lambda: _scored(score, (logits_TV,), inputs.target_T, grad_output_2T, backward), check)

    def check(output: _Output) -> None:
        assert_scores(output, true, size.dtype)
        if backward:
            assert output[2] is not None
            want_TV = true_gradients[output[1] is not None]
            assert_close("gradient", output[2][checked], want_TV, size.dtype)

    scorers = _scorers("token_logprob", device, token_logprob, backward=backward)
    return Work(
        tuple(contender(*scorer) for scorer in scorers.items()),
        inputs.params,
        # The backward reads the logits again and writes as much.
        bytes=(3 if backward else 1) * size.T * size.V * size.dtype.itemsize,
        runs_on="stream",
    )


def _token_logprob_case(name: str, size: HeadSize, *, backward: bool) -> Case:
    passes = "forward and backward" if backward else "forward"
    return Case(
        f"kernels/token_logprob{'' if backward else '_forward'}{name}",
        f"log-probabilities of the targets and entropies from logits {size.T} x {size.V}, {passes}",
        functools.partial(_prepare_token_logprob, size=size, backward=backward),
        estimate_s=2.0 if backward else 1.0,
        device_estimate_s=27.0 if backward else 17.0,
    )


# ----------------------------------------------------------------------------------------- from hidden states


def _prepare_linear_logprob(device: Device, *, size: HeadSize, backward: bool) -> Work:
    inputs = Inputs.on(device, size)
    size, true = inputs.size, inputs.true_scores()
    leaves = inputs.leaves()
    grad_output_2T = torch.randn(2, size.T, device=device.torch_device)

    def check(output: _Output) -> None:
        assert_scores(output, true, size.dtype)

    def contender(name: str, score: Score) -> Contender:
        return Contender(name, lambda: _scored(score, leaves, inputs.target_T, grad_output_2T, backward), check)

    scorers = _scorers("linear_logprob", device, linear_logprob)
    if backward and "tiled" in scorers:
        del scorers["tiled"]
        budgets = {
            "tiled, 0.3 GiB": _LEAST_MEMORY,
            "tiled, 0.5 GiB": _LOW_MEMORY,
            "tiled, 1 GiB": _USUAL_MEMORY,
            "tiled, 3 GiB": _KEEPING,
        }
        scorers = {
            name: functools.partial(
                linear_logprob, with_entropy=True, implementation="tiled", memory_budget_bytes=budget
            )
            for name, budget in budgets.items()
        } | scorers
    contenders = [contender(*scorer) for scorer in scorers.items()]
    if not backward and not device.spec.is_host:
        contenders.append(Contender(_BARE_FORWARD, _bare_product(inputs), lambda _: None))
    return Work(
        tuple(contenders),
        inputs.params,
        # The logits and both gradients; some implementations make the logits twice, which is not needed.
        flops=(6 if backward else 2) * size.T * size.V * size.H,
        bytes=(2 if backward else 1) * (size.T + size.V) * size.H * size.dtype.itemsize,
        runs_on="stream",
    )


def _bare_product(inputs: Inputs) -> Callable[[], None]:
    """Return the device's own product, in chunks of rows; its results are thrown away."""
    size, weight_HV = inputs.size, inputs.weight_VH.T
    logits_TV = inputs.hidden_TH.new_empty(min(size.T, _WEIGHT_ROWS), size.V)

    def run() -> None:
        for start in range(0, size.T, _WEIGHT_ROWS):
            hidden_TH = inputs.hidden_TH[start : start + _WEIGHT_ROWS]
            torch.mm(hidden_TH, weight_HV, out=logits_TV[: len(hidden_TH)])

    return run


_FIRST_ROUND_S = {"0.5b": 85.0, "1.7b": 110.0, "8b": 55.0, "14b": 50.0}
"""On an H200; most of it is compiling, that of the peers too."""


def _linear_logprob_case(head: str, *, backward: bool) -> Case:
    prepare = functools.partial(_prepare_linear_logprob, size=_SIZES[head], backward=backward)
    name = "linear_logprob" if backward else "linear_logprob_forward"
    passes = "forward and backward" if backward else "forward"
    return Case(
        f"kernels/{name}/{head}",
        f"log-probabilities and entropies from hidden states, {_of(head)}, {passes}",
        prepare,
        effort="quick" if head == "8b" and backward else "standard",
        estimate_s=3.0,
        device_estimate_s=_FIRST_ROUND_S[head] if backward else 30.0,
    )


def _of(head: str) -> str:
    """Return the words of a description for a head."""
    if head in HEADS:
        return f"of a model of {head.upper()}"
    size = SHAPES[head]
    return f"{size.T} x {size.H} x {size.V}"


# ----------------------------------------------------------------------------------------------------- losses


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
    """Return the device's own three products, on numbers like those of a training step; their results mean nothing."""
    size, hidden_TH, weight_VH = inputs.size, inputs.hidden_TH, inputs.weight_VH
    workspace_TV = torch.randn(min(size.T, _WEIGHT_ROWS), size.V, device=hidden_TH.device, dtype=size.dtype)
    hidden_gradient_TH = torch.empty_like(hidden_TH)
    weight_gradient_VH = torch.zeros_like(weight_VH, dtype=torch.float32)

    def run() -> None:
        for start in range(0, size.T, _LOGITS_ROWS):
            rows = slice(start, start + _LOGITS_ROWS)
            workspace = workspace_TV[start % len(workspace_TV) :][:_LOGITS_ROWS]
            torch.mm(hidden_TH[rows], weight_VH.T, out=workspace)
            torch.mm(workspace, weight_VH, out=hidden_gradient_TH[rows])
        for start in range(0, size.T, _WEIGHT_ROWS):
            rows = slice(start, start + _WEIGHT_ROWS)
            out: dict[str, Any] = {"out_dtype": torch.float32, "out": weight_gradient_VH}
            torch.addmm(weight_gradient_VH, workspace_TV.T, hidden_TH[rows], **out)

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
            """Compare with float32 logits read by other kernels; on a host there is only one implementation."""
            assert all(bool(x.isfinite().all()) for x in output)
            if want is not None:
                assert_close("loss", output[0], want[0], torch.bfloat16)
                assert_close("hidden gradient", output[1][few], want[1][few], torch.bfloat16)

        return Contender(name, losses.runs(loss_fn, None), check)

    return losses.work([contender(name, _with_penalties(term)) for name, term in terms.items()])


def _loss_case(head: str) -> Case:
    return Case(
        f"kernels/linear_loss/{head}",
        f"clipped policy loss with k3 and entropy terms, {_of(head)}, both gradients",
        functools.partial(_prepare_loss, size=_SIZES[head]),
    )


def _sequences_case(head: str) -> Case:
    return Case(
        f"kernels/linear_loss_sequences/{head}",
        f"losses of sequences beside GRPO, with k3 and entropy terms, of a model of {head.upper()}",
        functools.partial(_prepare_sequences, size=HEADS[head]),
    )


# --------------------------------------------------------------------------------------------------- accuracy


def _prepare_accuracy(device: Device) -> Work:
    """Logits of unit scale, with gradients; and logits up to about 80, half of whose targets are the likeliest."""
    inputs, peaked = Inputs.on(device, ACCURACY), Inputs.on(device, ACCURACY, deviation=16.0)
    inputs = Inputs(inputs.size, inputs.hidden_TH / 2, inputs.weight_VH, inputs.target_T)
    peaked.target_T[::2] = (peaked.hidden_TH[::2] @ peaked.weight_VH.T).argmax(1)
    grad_output_2T = torch.randn(2, inputs.size.T, device=device.torch_device)
    true, true_peaked = inputs.true_scores(), peaked.true_scores()
    weight_T = torch.ones(inputs.size.T, device=device.torch_device)
    rows = {"g": grad_output_2T[0], "g_bar": grad_output_2T[1]}
    true_gradients = [inputs.true_gradients(loss, rows, weight_T)[1:] for loss in (_of_logprob, _of_both)]
    leaves = inputs.leaves()

    def contender(name: str, score: Score) -> Contender:
        def run() -> _Output:
            found = _scored(score, leaves, inputs.target_T, grad_output_2T, backward=True)
            with torch.no_grad():
                return *found, score(peaked.hidden_TH, peaked.weight_VH, peaked.target_T)[0]

        return Contender(name, run, check, quantities=errors)

    def check(output: _Output) -> None:
        assert_scores(output, true, inputs.size.dtype)

    def errors(output: _Output) -> dict[str, Quantity]:
        logprob_T, entropy_T, *gradients, peaked_T = output
        assert logprob_T is not None and peaked_T is not None and true.entropy is not None
        found = {
            "logprob_error": greatest(logprob_T, true.logprob),
            "peaked_logprob_error": greatest(peaked_T, true_peaked.logprob),
        }
        for name, got, want in zip(
            ("hidden_gradient_error", "weight_gradient_error"),
            gradients,
            true_gradients[entropy_T is not None],
            strict=True,
        ):
            assert got is not None
            found[name] = relative(got, want)
        if entropy_T is not None:
            error = ((entropy_T.double() - true.entropy) / true.entropy).abs().max()
            found["entropy_error"] = Quantity(max(float(error), 1e-30), "1")
        return found

    scorers = _scorers("linear_logprob", device, linear_logprob)
    contenders = tuple(contender(*scorer) for scorer in scorers.items())
    return Work(contenders, inputs.params, runs_on="stream")


def _of_logprob(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
    return per_token["g"] * logprob, {}


def _of_both(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
    assert entropy is not None
    return per_token["g"] * logprob + per_token["g_bar"] * entropy, {}


_LOGITS_CASES = {"": LOGITS, **{f"/{name}": size for name, size in MORE_LOGITS.items()}}

cases = (
    *(
        _token_logprob_case(name, size, backward=backward)
        for name, size in _LOGITS_CASES.items()
        for backward in (True, False)
    ),
    *(_linear_logprob_case(head, backward=True) for head in HEADS),
    *(_linear_logprob_case(head, backward=False) for head in (*HEADS, "short", "small_vocabulary")),
    *map(_loss_case, (*HEADS, "small_vocabulary", "long")),
    *map(_sequences_case, HEADS),
    Case(
        "kernels/linear_logprob_accuracy",
        "errors against float64: log-probability (also of logits up to 80), entropy, both gradients",
        _prepare_accuracy,
        estimate_s=5.0,
        device_estimate_s=42.0,
    ),
)
