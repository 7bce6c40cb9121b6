"""Advantages of sampled responses over the others of the same prompt.

For a group of n rewards R with mean mu and unbiased standard deviation sigma:

    grpo     (R - mu) / (sigma + epsilon)    (Shao et al. 2024, arXiv 2402.03300)
    dr_grpo  R - mu                          (Liu et al. 2025, arXiv 2503.20783)
    rloo     n / (n - 1) (R - mu)            (Ahmadian et al. 2024, arXiv 2402.14740): leave one out, R minus the
    mean of the others
    opo      R - sum(l R) / sum(l)           (Hao et al. 2025, arXiv 2505.23585), l the lengths of the responses
    reinforce++  ((R - mu) - m) / (s + epsilon)  (Hu et al. 2025, arXiv 2501.03262, with the group's mean as baseline):
    m and s are the mean and unbiased standard deviation of R - mu over all tokens of all groups

A response alone in its group has nothing to be compared with: mu (and the baseline of opo) is 0, as in verl, so that
its advantage is its reward, whitened in reinforce++. REINFORCE++ without groups is ``masked_whiten`` of a
``discounted_return``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.operands import check_values, first_violation

Mode = Literal["grpo", "rloo", "dr_grpo", "opo", "reinforce++"]
MODES = ("grpo", "rloo", "dr_grpo", "opo", "reinforce++")
_BY_LENGTH = ("opo", "reinforce++")


def group_advantage(
    rewards: Tensor | Sequence[float] | Sequence[Sequence[float]],
    *,
    group_size: int | None = None,
    group: Tensor | Sequence[int] | None = None,
    mode: Mode = "grpo",
    lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """The advantage of each reward within its group.

    Args:
        rewards: [P, n], a row for each prompt; or [N] with ``group_size`` or ``group``.
        group_size: [N] rewards are groups of so many in a row.
        group: [N] integers; equal numbers are one group, in any order and of any size.
        mode: see above.
        lengths: shape of the rewards; tokens of each response that count. Needed by "opo" and "reinforce++" alone.
        epsilon: keeps "grpo" and "reinforce++" finite when all rewards of a group, or of the batch, are equal.

    Returns:
        float32, shape of the rewards; computed in float64 from float32, so that equal rewards give exactly 0.

    Raises:
        InvalidInputError: rewards that are not finite, groups or lengths that do not fit them.
    """
    if mode not in MODES:
        raise InvalidInputError(f"group_advantage: mode must be one of {', '.join(MODES)}; got {mode!r}")
    reward = _checked_rewards(rewards)
    value_N, member_N = reward.reshape(-1).double(), _membership(reward, group_size, group)
    length_N = _checked_lengths(mode, lengths, reward)
    size_N = _group_sum(torch.ones_like(value_N), member_N)
    is_alone_N = size_N == 1
    weight_N = length_N if mode == "opo" else torch.ones_like(value_N)
    baseline_N = _group_sum(weight_N * value_N, member_N) / _group_sum(weight_N, member_N).clamp(min=1)
    centred_N = value_N - baseline_N.masked_fill(is_alone_N, 0.0)
    if mode == "rloo":
        centred_N *= size_N / (size_N - 1).clamp(min=1)
    elif mode == "grpo":
        variance_N = _group_sum(centred_N.square(), member_N) / (size_N - 1)
        centred_N /= variance_N.sqrt().masked_fill(is_alone_N, 1.0) + epsilon
    elif mode == "reinforce++":
        centred_N = _whitened(centred_N, length_N, epsilon)
    return centred_N.float().view(reward.shape)


def _whitened(value_N: Tensor, length_N: Tensor, epsilon: float) -> Tensor:
    """As if every token of a response held its value."""
    num_tokens = length_N.sum()
    centred_N = value_N - (length_N * value_N).sum() / num_tokens.clamp(min=1)
    variance = (length_N * centred_N.square()).sum() / (num_tokens - 1).clamp(min=1)
    return centred_N / (variance.sqrt() + epsilon)


def _checked_lengths(
    mode: str, lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None, reward: Tensor
) -> Tensor:
    """[N] float64; ones where the mode needs none."""
    if (lengths is not None) != (mode in _BY_LENGTH):
        verb = "needs lengths=, the tokens of each response" if lengths is None else "takes no lengths"
        raise InvalidInputError(f"group_advantage: mode {mode!r} {verb}")
    if lengths is None:
        return torch.ones(reward.numel(), dtype=torch.float64, device=reward.device)
    length = torch.as_tensor(lengths, device=reward.device)
    if length.shape != reward.shape:
        raise InvalidInputError(
            f"group_advantage: lengths must have the shape of rewards, {list(reward.shape)}; got {list(length.shape)}"
        )
    is_valid = length >= 0
    check_values(is_valid, lambda: f"group_advantage: lengths must be >= 0; got {first_violation(is_valid, length)}")
    return length.reshape(-1).double()


def _checked_rewards(rewards: Tensor | Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    try:
        reward = torch.as_tensor(rewards).detach().float()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"group_advantage: rewards must be numbers, [N] or [P, n] with rows of equal length ({error}); "
            "for groups of different sizes pass [N] and group="
        ) from error
    if reward.dim() not in (1, 2):
        raise InvalidInputError(f"group_advantage: rewards must be [N] or [P, n]; got {list(reward.shape)}")
    is_finite = reward.isfinite()
    check_values(
        is_finite,
        lambda: (
            f"group_advantage: rewards must be finite; got {first_violation(is_finite, reward)}. "
            "Give such a response a reward, or leave it out"
        ),
    )
    return reward


def _membership(reward: Tensor, group_size: int | None, group: Tensor | Sequence[int] | None) -> Tensor:
    """The group of each reward, [N] int64, numbered from 0."""
    if (reward.dim() == 2) + (group_size is not None) + (group is not None) != 1:
        raise InvalidInputError(
            "group_advantage: say the groups in one way: rewards [P, n], or [N] with group_size= or group=; "
            f"got rewards {list(reward.shape)}, group_size={group_size}, "
            f"group {'given' if group is not None else 'not given'}"
        )
    count = reward.numel()
    if group is not None:
        group_N = torch.as_tensor(group, device=reward.device)
        if group_N.shape != reward.shape:
            raise InvalidInputError(f"group_advantage: group must be [{count}]; got {list(group_N.shape)}")
        member_N: Tensor = torch.unique(group_N, return_inverse=True)[1]
        return member_N
    size = reward.shape[1] if group_size is None else group_size
    if group_size is not None and (group_size < 1 or count % group_size):
        raise InvalidInputError(f"group_advantage: group_size={group_size} does not divide {count} rewards")
    return torch.arange(count, device=reward.device) // max(size, 1)


def _group_sum(value_N: Tensor, member_N: Tensor) -> Tensor:
    """For each reward the sum over its group. ``index_put_`` adds in a fixed order on every device."""
    sum_G = torch.zeros_like(value_N).index_put_((member_N,), value_N, accumulate=True)
    return sum_G[member_N]
