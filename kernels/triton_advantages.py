# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""``group_advantage`` of groups that are rows of one length, in Triton: one read and one write.

Letters: P groups, N rewards of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.kernels.advantages import Mode
from rlcore.kernels.operands import check_values

_TILE_ITEMS = 2048
"""Rewards of a program: several groups, unless a group is longer."""


@triton.jit(do_not_specialize=["N"])
def _advantage_kernel(
    rewards, lengths, advantages, is_valid, P, N, epsilon,
    LEAVES_OUT: tl.constexpr, NORMALISES: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    i = tl.arange(0, BN)
    if N is None:  # as many as BN: known when this is compiled, so that neighbours are read together
        N = tl.full((), BN, tl.int32)
        inside = (p < P)[:, None] & (i >= 0)[None, :]
        at = p[:, None] * BN + i[None, :]
    else:
        inside = (p < P)[:, None] & (i < N)[None, :]
        at = p[:, None] * N + i[None, :]
    reward = tl.load(rewards + at, mask=inside, other=0.0)
    x = reward.to(tl.float64)
    num_rewards = N.to(tl.float64)
    num_others = tl.maximum(num_rewards - 1.0, 1.0)
    if lengths is None:
        num_negative = 0
        baseline = tl.sum(x, 1) / num_rewards
    else:
        weight = tl.load(lengths + at, mask=inside, other=0.0)
        num_negative = tl.sum((weight < 0.0).to(tl.int32))
        baseline = tl.sum(x * weight, 1) / tl.maximum(tl.sum(weight, 1), 1.0)
    centred = tl.where(inside, x - tl.where(N > 1, baseline, 0.0)[:, None], 0.0)
    if LEAVES_OUT:
        centred *= tl.where(N > 1, num_rewards / num_others, 1.0)
    if NORMALISES:  # a division for each group, not for each reward: it is slow in float64
        deviation = tl.sqrt(tl.sum(centred * centred, 1) * (1.0 / num_others))
        centred *= (1.0 / (tl.where(N > 1, deviation, 1.0) + epsilon))[:, None]
    tl.store(advantages + at, centred.to(tl.float32), mask=inside)
    # One reward that is not finite makes its baseline so: float64 holds every sum of others.
    num_wrong = tl.sum((tl.abs(baseline) < float("inf")).to(tl.int32) ^ 1) + num_negative
    tl.store(is_valid + tl.program_id(0), num_wrong == 0)


def group_advantage_triton(
    reward_PN: Tensor, length_PN: Tensor | None, member_N: None, *, mode: Mode, epsilon: float
) -> Tensor:
    """One launch, and two for the check."""
    (num_groups, size), advantage_PN = reward_PN.shape, torch.empty_like(reward_PN)
    if not reward_PN.numel():
        return advantage_PN
    block = triton.next_power_of_2(size)
    per_program = max(_TILE_ITEMS // block, 1)
    num_programs = triton.cdiv(num_groups, per_program)
    is_valid = torch.empty(num_programs, dtype=torch.bool, device=reward_PN.device)
    _advantage_kernel[(num_programs,)](
        reward_PN, length_PN, advantage_PN, is_valid, num_groups, None if size == block else size, epsilon,
        LEAVES_OUT=mode == "rloo", NORMALISES=mode == "grpo", BP=per_program, BN=block, num_warps=4,
    )  # fmt: skip
    check_values(is_valid, lambda: "group_advantage: rewards must be finite, and lengths >= 0")
    return advantage_PN
