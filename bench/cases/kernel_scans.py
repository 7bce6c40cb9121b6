"""Advantages, returns and losses of packed tokens, beside one copy of the bytes that they must read and write.

A run on an accelerator is many calls in a row, so that what is timed is the device and not the host; the copy too.

Letters: T tokens, P groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work
from rlcore.bench.cases.kernel_inputs import assert_close
from rlcore.device import Device
from rlcore.kernels.losses.combine import combine
from rlcore.kernels.losses.interface import LossOutput
from rlcore.kernels.losses.penalty import entropy_bonus, kl
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.kernels.returns.group_advantage import group_advantage
from rlcore.kernels.returns.scan import discounted_return, gae
from rlcore.kernels.token.loss import token_loss
from rlcore.registry import registry

_HOST_TOKENS, _ACCELERATOR_TOKENS = 2**16, 2**24
_MEAN_TOKENS = 1024
"""Mean length of a sequence."""
_GROUP = 16
_GAMMA, _LAM = 0.99, 0.95
_CALLS = 20

Call = Callable[[], Sequence[Tensor]]


def _work(calls: dict[str, Call], token_bytes: int, tokens: Tensor, params: dict[str, int | float | str]) -> Work:
    """Return the work of ``calls``; the results of the first are the truth for the others."""
    truth = next(iter(calls.values()))()
    num_calls = 1 if tokens.is_cpu else _CALLS

    def contender(name: str, call: Call) -> Contender:
        def run() -> Sequence[Tensor]:
            for _ in range(num_calls - 1):
                call()
            return call()

        return Contender(name, run, check)

    def check(output: Sequence[Tensor]) -> None:
        for position, (got, want) in enumerate(zip(output, truth, strict=True)):
            assert_close(f"output {position}", got, want, torch.float32)

    source = torch.randint(256, (token_bytes * len(tokens) // 2,), dtype=torch.uint8, device=tokens.device)
    copied = torch.empty_like(source)

    def copies() -> None:
        for _ in range(num_calls):
            copied.copy_(source)

    contenders = [contender(*pair) for pair in calls.items()]
    contenders.append(Contender("copy", copies, lambda _: None))
    num_bytes = num_calls * token_bytes * len(tokens)
    return Work(tuple(contenders), {"T": len(tokens), **params, "calls": num_calls}, bytes=num_bytes, runs_on="stream")


def _by_implementation(op: str, device: Device, call: Callable[..., Any]) -> dict[str, Call]:
    """Return the implementations without a loop over the tokens on the host, the slowest first."""
    entries = sorted(registry().ops[op], key=lambda entry: entry.priority)
    names = [entry.name for entry in entries if entry.device_type in ("*", device.type)]
    if op != "group_advantage":
        names.remove("reference")

    def called(name: str) -> Sequence[Tensor]:
        found = call(implementation=name)
        return (found,) if isinstance(found, Tensor) else found

    return {name: functools.partial(called, name) for name in names}


def _tokens(device: Device, count: int) -> list[Tensor]:
    device.seed(0)
    num_tokens = _HOST_TOKENS if device.spec.is_host else _ACCELERATOR_TOKENS
    return list(torch.randn(count, num_tokens, device=device.torch_device))


def _edges(tokens: Tensor) -> Tensor:
    lengths = torch.randint(1, 2 * _MEAN_TOKENS, (2 * len(tokens) // _MEAN_TOKENS,), device=tokens.device)
    edges = torch.nn.functional.pad(lengths.cumsum(0).clamp(max=len(tokens)), (1, 0))
    return torch.cat((edges, edges.new_tensor([len(tokens)])))


def _prepare_gae(device: Device) -> Work:
    values_T, rewards_T, noise_T = _tokens(device, 3)
    shape: dict[str, Any] = {"mask": noise_T > -1, "cu_seqlens": _edges(values_T), "gamma": _GAMMA}
    calls = _by_implementation("gae", device, functools.partial(gae, values_T, rewards_T, lam=_LAM, **shape))
    return _work(calls, 17, values_T, {"mean_sequence": _MEAN_TOKENS})


def _prepare_return(device: Device) -> Work:
    rewards_T, noise_T = _tokens(device, 2)
    shape: dict[str, Any] = {"mask": noise_T > -1, "cu_seqlens": _edges(rewards_T), "gamma": _GAMMA}
    calls = _by_implementation("discounted_return", device, functools.partial(discounted_return, rewards_T, **shape))
    return _work(calls, 9, rewards_T, {"mean_sequence": _MEAN_TOKENS})


def _prepare_groups(device: Device) -> Work:
    (rewards_T,) = _tokens(device, 1)
    call = functools.partial(group_advantage, rewards_T.view(-1, _GROUP))
    return _work(_by_implementation("group_advantage", device, call), 8, rewards_T, {"group": _GROUP})


def _prepare_loss(device: Device) -> Work:
    """Measure the loss with its statistics and both gradients: plain, compiled whole, and that captured in a graph.

    The graph shows the time of the device without the host's for autograd and a dozen launches.
    """
    noise, advantages_T, drift_T, other_T = _tokens(device, 4)
    logprob_T, entropy_T = (-noise.abs()).requires_grad_(), noise.abs().requires_grad_()
    # Some within and some beyond the clip range, none near its bounds, where rounding could switch a gradient off.
    drift_T = 0.05 * drift_T.clamp(-1, 1) + 0.5 * other_T.clamp(-1, 1).round()
    per_token = {
        "old_logprobs": logprob_T.detach() + drift_T,
        "ref_logprobs": logprob_T.detach() + 0.05 * other_T,
        "advantages": advantages_T,
    }
    weight_T = torch.full_like(noise, 1 / len(noise))
    loss_fn = combine(ppo_clip(), kl(coef=0.01), entropy_bonus(coef=0.01))

    def evaluated(logprob_T: Tensor, entropy_T: Tensor) -> LossOutput:
        return token_loss(logprob_T, loss_fn, per_token=per_token, token_weight=weight_T, entropy=entropy_T)

    def call(evaluated: Callable[[Tensor, Tensor], LossOutput]) -> Sequence[Tensor]:
        loss, stats = evaluated(logprob_T, entropy_T)
        return loss.detach(), *torch.autograd.grad(loss, (logprob_T, entropy_T)), *stats.values()

    calls: dict[str, Call] = {"plain": functools.partial(call, evaluated)}
    if not device.spec.is_host:
        compiled = functools.partial(call, torch.compile(evaluated, fullgraph=True))
        calls["plain, compiled whole"] = compiled
        calls["compiled whole, captured"] = _captured(device.type, compiled)
    return _work(calls, 32, noise, {})


def _captured(device_type: str, call: Call) -> Call:
    """``call`` as one replay of a graph of its launches."""
    vendor = torch.get_device_module(device_type)
    for _ in range(2):  # compiles, and takes the memory that it needs
        call()
    graph = getattr(vendor, f"{device_type.upper()}Graph")()
    with vendor.graph(graph):
        output = call()

    def replay() -> Sequence[Tensor]:
        graph.replay()
        return output

    return replay


cases = (
    Case("kernels/gae", "generalised advantages of packed sequences", _prepare_gae, estimate_s=2.0),
    Case("kernels/discounted_return", "discounted returns of packed sequences", _prepare_return, estimate_s=2.0),
    Case("kernels/group_advantage", "advantages within groups of rewards", _prepare_groups, estimate_s=1.0),
    Case(
        "kernels/token_loss",
        "clipped policy loss with k3 and entropy terms of log-probabilities, its statistics and gradients",
        _prepare_loss,
        estimate_s=1.0,
        device_estimate_s=8.0,
    ),
)
