"""What is on the path of every step on the host: look-ups, choices, batches, advantages."""

from __future__ import annotations

from typing import Any

import torch

from rlcore.engines.batch import collate
from rlcore.engines.sampling.completion import Completion, RequestOutput
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.kernels.losses.token_weights import token_weights
from rlcore.kernels.returns.group_advantage import group_advantage
from rlcore.registry import get_device
from tests.accuracy import assert_within_rounding


def test_device_lookup(benchmark_on: Any, device: Any) -> None:
    assert benchmark_on(device, get_device, device.name) is device


def test_choice_of_an_operator(benchmark_on: Any, device: Any) -> None:
    query = Query(device.type, torch.bfloat16, 0, 151_936)
    assert benchmark_on(device, choose, "token_logprob", query).op == "token_logprob"


def test_collate(benchmark_on: Any, device: Any) -> None:
    answers = [
        Completion(token_ids=list(range(n)), logprobs=[-1.0] * n, text="", finish_reason="stop", version_spans=[])
        for n in range(8, 72)
    ]
    outputs = [RequestOutput(prompt=None, prompt_token_ids=[1, 2, 3], outputs=answers)]
    batch = benchmark_on(device, collate, outputs)
    assert int(batch["loss_mask"].sum()) == sum(range(8, 72))


def test_group_advantage(benchmark_on: Any, device: Any) -> None:
    rewards = torch.arange(4096.0, device=device.torch_device).view(256, 16) % 7
    advantages = benchmark_on(device, group_advantage, rewards)
    # A group's 16 advantages, each rounded, add up to nothing.
    assert_within_rounding(advantages.sum(1), torch.zeros(256), terms=2 * 16, magnitude=advantages.abs().sum(1))


def test_policy_loss(benchmark_on: Any, device: Any) -> None:
    logprob = torch.full((65_536,), -1.0, device=device.torch_device)
    per_token = {"old_logprobs": logprob, "advantages": torch.ones_like(logprob)}
    value, _ = benchmark_on(device, ppo_clip(), logprob, torch.zeros_like(logprob), per_token)
    assert float(value.mean()) == -1.0


def test_token_weights(benchmark_on: Any, device: Any) -> None:
    mask = torch.ones(64, 1024, dtype=torch.bool, device=device.torch_device)
    weights = benchmark_on(device, token_weights, "token-mean", mask)
    assert_within_rounding(weights.sum(), 1.0, terms=weights.numel() + 1)
