# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""``group_advantage`` of groups that are rows of one length, in Triton: one read and one write.

A group's mean is summed in float64 and taken off in two float32 parts, so that a difference is as exact as in float64,
at a fraction of its instructions; the rest needs no more than float32.

Letters: P groups, N rewards of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.kernels.operands import check_values, kernels_verdict
from rlcore.kernels.returns.group_advantage import Mode

_TILE_ITEMS = 2048
"""Rewards of a program: several groups, unless a group is longer."""
_FINITE = "finite, and in mode 'grpo' their variance below 3e38"


@triton.jit(do_not_specialize=["N"])
def _advantage_kernel(
    rewards, lengths, advantages, is_valid, P, N, epsilon,
    LEAVES_OUT: tl.constexpr, NORMALISES: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    i = tl.arange(0, BN)
    IS_KNOWN: tl.constexpr = N is None  # as many as BN: neighbours are read together, and 1 / N is exact
    if IS_KNOWN:
        N = tl.full((), BN, tl.int32)
        inside = (p < P)[:, None] & (i >= 0)[None, :]
        at = p[:, None] * BN + i[None, :]
    else:
        inside = (p < P)[:, None] & (i < N)[None, :]
        at = p[:, None] * N + i[None, :]
    reward = tl.load(rewards + at, mask=inside, other=0.0)
    x = reward.to(tl.float64)
    if lengths is None:
        num_negative = 0
        baseline = tl.sum(x, 1) * (1.0 / BN) if IS_KNOWN else tl.sum(x, 1) / N.to(tl.float64)
    else:
        weight = tl.load(lengths + at, mask=inside, other=0).to(tl.float64)
        num_negative = tl.sum((weight < 0.0).to(tl.int32))
        baseline = tl.sum(x * weight, 1) / tl.maximum(tl.sum(weight, 1), 1.0)
    # One reward that is not finite makes its baseline so: float64 holds every sum of others.
    is_wrong = (tl.abs(baseline) < float("inf")) == 0
    baseline = tl.where(N > 1, baseline, 0.0)
    high = baseline.to(tl.float32)
    low = (baseline - high.to(tl.float64)).to(tl.float32)
    centred = tl.where(inside, reward - high[:, None] - low[:, None], 0.0)
    num_others = tl.maximum(N - 1, 1).to(tl.float32)
    if LEAVES_OUT:
        centred *= tl.where(N > 1, N.to(tl.float32) / num_others, 1.0)
    if NORMALISES:  # a division for each group, not for each reward
        variance = tl.sum(centred * centred, 1) / num_others
        is_wrong |= (variance < float("inf")) == 0
        centred *= (1.0 / (tl.where(N > 1, tl.sqrt(variance), 1.0) + epsilon))[:, None]
    tl.store(advantages + at, centred, mask=inside)
    num_wrong = tl.sum(is_wrong.to(tl.int32)) + num_negative
    tl.store(is_valid, num_wrong == 0, mask=num_wrong > 0)


def group_advantage_triton(
    reward_PN: Tensor, length_PN: Tensor | None, member_N: None, *, mode: Mode, epsilon: float
) -> Tensor:
    """Compute with two launches, and one for the check."""
    (num_groups, size), advantage_PN = reward_PN.shape, torch.empty_like(reward_PN)
    if not reward_PN.numel():
        return advantage_PN
    block = triton.next_power_of_2(size)
    per_program = max(_TILE_ITEMS // block, 1)
    num_programs = triton.cdiv(num_groups, per_program)
    is_valid = kernels_verdict(reward_PN.device)
    _advantage_kernel[(num_programs,)](
        reward_PN, length_PN, advantage_PN, is_valid, num_groups, None if size == block else size, epsilon,
        LEAVES_OUT=mode == "rloo", NORMALISES=mode == "grpo", BP=per_program, BN=block, num_warps=4,
    )  # fmt: skip
    check_values(is_valid, lambda: f"group_advantage: rewards must be {_FINITE}, and lengths >= 0")
    return advantage_PN
