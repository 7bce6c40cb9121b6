from __future__ import annotations

import math

import pytest
import torch

from rlcore.errors import InvalidInputError
from rlcore.ops import group_advantage


def test_each_mode_is_its_formula_group_by_group() -> None:
    rewards = torch.randn(5, 4)
    centred = rewards - rewards.mean(1, keepdim=True)
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    grpo = centred / (rewards.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(group_advantage(rewards), grpo)
    torch.testing.assert_close(group_advantage(rewards, mode="dr_grpo"), centred)
    torch.testing.assert_close(group_advantage(rewards, mode="rloo"), rewards - others)


def test_groups_can_be_given_as_rows_by_size_or_by_number() -> None:
    rewards = torch.randn(6, 4)
    by_rows = group_advantage(rewards)
    assert torch.equal(group_advantage(rewards.tolist()), by_rows)
    assert torch.equal(group_advantage(rewards.flatten(), group_size=4), by_rows.flatten())
    order = torch.randperm(24)
    group = (torch.arange(24) // 4 * 7 - 3)[order]
    shuffled = group_advantage(rewards.flatten()[order], group=group)
    torch.testing.assert_close(shuffled, by_rows.flatten()[order])


def test_groups_of_different_sizes_are_normalised_each_by_itself() -> None:
    found = group_advantage([1.0, 2.0, 5.0, 3.0], group=[0, 0, 9, 0], mode="rloo")
    torch.testing.assert_close(found, torch.tensor([-1.5, 0.0, 5.0, 1.5]))


@pytest.mark.parametrize("mode", ["grpo", "rloo", "dr_grpo"])
def test_equal_rewards_give_exactly_zero_and_one_alone_keeps_its_reward(mode: str) -> None:
    assert group_advantage(torch.full((3, 7), 0.1), mode=mode).count_nonzero() == 0
    torch.testing.assert_close(group_advantage([[2.5]], mode=mode), torch.tensor([[2.5]]), rtol=1e-5, atol=0)


def test_no_rewards_give_no_advantages() -> None:
    assert group_advantage(torch.zeros(0), group_size=4).shape == (0,)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rewards": [[1.0, math.nan]]}, r"rewards must be finite; got nan at \[0, 1\]. Give such a response a reward"),
        ({"rewards": [1.0, math.inf], "group_size": 2}, r"rewards must be finite; got inf at \[1\]"),
        ({"rewards": [[1.0, 2.0], [3.0]]}, r"rows of equal length .* pass \[N\] and group="),
        ({"rewards": torch.zeros(2, 2, 2)}, r"rewards must be \[N\] or \[P, n\]; got \[2, 2, 2\]"),
        ({"rewards": [1.0, 2.0]}, r"say the groups in one way: .* got rewards \[2\], group_size=None, group not given"),
        ({"rewards": [[1.0, 2.0]], "group_size": 2}, "say the groups in one way"),
        ({"rewards": [1.0, 2.0, 3.0], "group_size": 2}, "group_size=2 does not divide 3 rewards"),
        ({"rewards": [1.0, 2.0, 3.0], "group_size": 0}, "group_size=0 does not divide 3 rewards"),
        ({"rewards": [1.0, 2.0], "group": [0]}, r"group must be \[2\]; got \[1\]"),
        ({"rewards": [[1.0]], "mode": "ppo"}, "mode must be one of grpo, rloo, dr_grpo; got 'ppo'"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        group_advantage(**arguments)  # type: ignore[arg-type]
