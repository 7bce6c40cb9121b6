"""The advantage of sampled responses over the others of the same prompt.

For a group of n rewards R with mean mu and unbiased standard deviation sigma:

    grpo     (R - mu) / (sigma + epsilon)    (Shao et al. 2024, arXiv 2402.03300)
    dr_grpo  R - mu                          (Liu et al. 2025, arXiv 2503.20783)
    rloo     n / (n - 1) (R - mu)            (Ahmadian et al. 2024, arXiv 2402.14740): leave one out, R minus the
    mean of the others
    opo      R - sum(l R) / sum(l)           (Hao et al. 2025, arXiv 2505.23585), l the lengths of the responses
    reinforce++  ((R - mu) - m) / (s + epsilon)  (Hu et al. 2025, arXiv 2501.03262, with the group's mean as baseline):
    m and s are the mean and unbiased standard deviation of R - mu over all tokens of all groups

A response alone in its group has no other to compare with: mu (and the baseline of opo) is 0, as in verl, so that
its advantage is its reward, whitened in reinforce++. REINFORCE++ without groups is ``masked_whiten`` of a
``discounted_return``.

Letters: P groups, n rewards of a group; N rewards of groups of any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlcore.arguments import AT_LEAST_0, WHOLE, Kind, optional, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.operands import check_tensor, check_values, first_violation, is_checked_on_device, is_whole

Mode = Literal["grpo", "rloo", "dr_grpo", "opo", "reinforce++"]
MODES = ("grpo", "rloo", "dr_grpo", "opo", "reinforce++")
_BY_LENGTH = ("opo", "reinforce++")
_REWARDS = Kind(
    "numbers, [N] or [P, n] with rows of equal length; for groups of different sizes pass [N] and group=",
    lambda values: not values.is_complex(),
)
_LENGTHS = Kind("numbers of tokens in the shape of rewards", lambda values: not values.is_complex())
_GROUP = Kind("[N] integers", lambda values: is_whole(values) or values.numel() == 0)  # [] is a tensor of float32
_LONG = 4096
"""A group of more rewards is too long for one program."""


@takes("group_advantage", group_size=optional(WHOLE), epsilon=AT_LEAST_0)
def group_advantage(
    rewards: Tensor | Sequence[float] | Sequence[Sequence[float]],
    *,
    group_size: int | None = None,
    group: Tensor | Sequence[int] | None = None,
    mode: Mode = "grpo",
    lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    epsilon: float = 1e-6,
    implementation: str | None = None,
) -> Tensor:
    """Compute the advantage of each reward within its group.

    Args:
        rewards: [P, n], a row for each prompt; or [N] with ``group_size`` or ``group``.
        group_size: [N] rewards are groups of so many in a row.
        group: [N] integers; equal numbers are one group, in any order and of any size.
        mode: see above.
        lengths: shape of the rewards; tokens of each response that count. Needed by "opo" and "reinforce++" alone.
        epsilon: keeps "grpo" and "reinforce++" finite when all rewards of a group, or of the batch, are equal.
        implementation: run this one or raise; None chooses.

    Returns:
        float32, shape of the rewards; computed in float64 where the device has it. Equal rewards give exactly 0.

    Raises:
        InvalidInputError: rewards that are not finite, groups or lengths that do not fit them.
        UnsupportedError: the implementation asked for refuses, with the reason.
    """
    if mode not in MODES:
        raise InvalidInputError(f"group_advantage: mode must be one of {', '.join(MODES)}; got {mode!r}")
    reward, length = _rewards(rewards), None
    if (lengths is not None) != (mode in _BY_LENGTH):
        verb = "needs lengths=, the tokens of each response" if lengths is None else "takes no lengths"
        raise InvalidInputError(f"group_advantage: mode {mode!r} {verb}")
    if lengths is not None:
        length = _lengths(lengths, reward)
    shape, member_N = _groups(reward, group_size, group)
    if not is_checked_on_device(reward):
        check_rewards(reward, length)
    flags = {mode: True, "irregular": member_N is not None, "long": member_N is None and shape[-1] > _LONG}
    query = Query(reward.device.type, reward.dtype, 0, 0, frozenset(name for name, is_used in flags.items() if is_used))
    run = choose("group_advantage", query, implementation).fn
    length = None if length is None else length.reshape(shape)
    found: Tensor = run(reward.reshape(shape), length, member_N, mode=mode, epsilon=epsilon)
    return found.view(reward.shape)


def group_advantage_reference(
    reward: Tensor, length: Tensor | None, member_N: Tensor | None, *, mode: Mode, epsilon: float
) -> Tensor:
    """Compute in plain torch in float64: [P, n], or [N] whose groups ``member_N`` numbers from 0.

    torch_npu lowers float64 to float32. So sums are of differences from one reward of the group: they are 0 where all
    rewards are equal.
    """
    if is_checked_on_device(reward):
        check_rewards(reward, length)

    def total(value: Tensor) -> Tensor:
        if member_N is None:
            return value.sum(1, keepdim=True)
        # index_put_ adds in a fixed order on every device
        return torch.zeros_like(value).index_put_((member_N,), value, accumulate=True)[member_N]

    def one_of_each(value: Tensor) -> Tensor:
        if member_N is None:
            return value[:, :1]
        return torch.zeros_like(value).scatter_reduce_(0, member_N, value, "amax", include_self=False)[member_N]

    value, length = reward.double(), None if length is None else length.double()
    size = total(torch.ones_like(value))
    weight = length if length is not None and mode == "opo" else torch.ones_like(value)
    total_weight = total(weight)
    value = value - one_of_each(value).masked_fill((size == 1) | (total_weight == 0), 0.0)
    baseline = total(weight * value) / total_weight.clamp(min=1)
    centred = value - baseline.masked_fill(size == 1, 0.0)
    if mode == "rloo":
        centred *= size / (size - 1).clamp(min=1)
    elif mode == "grpo":
        variance = total(centred.square()) / (size - 1)
        centred /= variance.sqrt().masked_fill(size == 1, 1.0) + epsilon
    elif length is not None and mode == "reinforce++":
        centred = _whitened(centred, length, epsilon)
    return centred.float()


def _whitened(value: Tensor, length: Tensor, epsilon: float) -> Tensor:
    """Whiten as if every token of a response held its value."""
    num_tokens = length.sum()
    centred = value - (length * value).sum() / num_tokens.clamp(min=1)
    variance = (length * centred.square()).sum() / (num_tokens - 1).clamp(min=1)
    return centred / (variance.sqrt() + epsilon)


def _lengths(lengths: Tensor | Sequence[int] | Sequence[Sequence[int]], reward: Tensor) -> Tensor:
    """Return the lengths in the shape of the rewards."""
    length = _tensor("lengths", lengths, _LENGTHS, reward.device)
    if length.shape != reward.shape:
        raise InvalidInputError(
            f"group_advantage: lengths must have the shape of rewards, {list(reward.shape)}; got {list(length.shape)}"
        )
    return length.contiguous()


def _rewards(rewards: Tensor | Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    reward = _tensor("rewards", rewards, _REWARDS).float().contiguous()
    if reward.dim() not in (1, 2):
        raise InvalidInputError(f"group_advantage: rewards must be [N] or [P, n]; got {list(reward.shape)}")
    return reward


def _tensor(name: str, values: object, kind: Kind, device: torch.device | None = None) -> Tensor:
    try:
        tensor = torch.as_tensor(values, device=device).detach()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"group_advantage: {name} must be {kind.words}; torch.as_tensor: {error}") from error
    check_tensor(f"group_advantage: {name}", tensor)
    if not kind.has(tensor):
        raise InvalidInputError(f"group_advantage: {name} must be {kind.words}; got {tensor.dtype}")
    return tensor


def check_rewards(reward: Tensor, length: Tensor | None) -> None:
    is_finite = reward.isfinite()
    check_values(
        is_finite,
        lambda: (
            f"group_advantage: rewards must be finite; got {first_violation(is_finite, reward)}. "
            "Give such a response a reward, or leave it out"
        ),
    )
    if length is not None:
        is_valid = (length >= 0) & length.isfinite()
        check_values(
            is_valid,
            lambda: f"group_advantage: lengths must be finite and >= 0; got {first_violation(is_valid, length)}",
        )


def _groups(
    reward: Tensor, group_size: int | None, group: Tensor | Sequence[int] | None
) -> tuple[tuple[int, ...], Tensor | None]:
    """Return [P, n] and None; or [N] and the group of each reward, [N] int64."""
    if (reward.dim() == 2) + (group_size is not None) + (group is not None) != 1:
        raise InvalidInputError(
            "group_advantage: say the groups in one way: rewards [P, n], or [N] with group_size= or group=; "
            f"got rewards {list(reward.shape)}, group_size={group_size}, "
            f"group {'given' if group is not None else 'not given'}"
        )
    count = reward.numel()
    if group is not None:
        group_N = _tensor("group", group, _GROUP, reward.device).long()
        if group_N.shape != reward.shape:
            raise InvalidInputError(f"group_advantage: group must be [{count}]; got {list(group_N.shape)}")
        return (count,), _numbered(group_N)
    if group_size is not None and (group_size < 1 or count % group_size):
        raise InvalidInputError(f"group_advantage: group_size={group_size} does not divide {count} rewards")
    return (tuple(reward.shape) if group_size is None else (count // group_size, group_size)), None


def _numbered(group_N: Tensor) -> Tensor:
    """Number the groups from 0, in the order of their names; ``torch.unique`` would wait for the device."""
    sorted_N, order_N = group_N.sort(stable=True)
    is_first_N = torch.nn.functional.pad(sorted_N.diff() != 0, (1, 0))[: len(group_N)]  # also of no rewards
    number_N = is_first_N.cumsum(0)
    return torch.empty_like(number_N).scatter_(0, order_N, number_N)
