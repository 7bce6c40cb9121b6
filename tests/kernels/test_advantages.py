from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.returns.group_advantage import MODES
from rlcore.ops import group_advantage
from tests.accuracy import assert_within_rounding
from tests.kernels.plain import assert_advantages_as_exact


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """Advantages are computed in float64, and rounded at the end."""
    assert found.dtype == torch.float32
    assert_within_rounding(found, exact, terms=1)


def test_each_mode_is_its_formula_group_by_group() -> None:
    rewards = torch.randn(5, 4)
    wide = rewards.double()
    centred = wide - wide.mean(1, keepdim=True)
    others = (wide.sum(1, keepdim=True) - wide) / 3
    grpo = centred / (wide.std(1, keepdim=True) + 1e-6)
    for mode, exact in {"grpo": grpo, "dr_grpo": centred, "rloo": wide - others}.items():
        assert_rounded_once(group_advantage(rewards, mode=mode), exact)  # type: ignore[arg-type]


def test_groups_can_be_given_as_rows_by_size_or_by_number() -> None:
    rewards = torch.randn(6, 4)
    by_rows = group_advantage(rewards)
    assert torch.equal(group_advantage(rewards.tolist()), by_rows)
    assert torch.equal(group_advantage(rewards.flatten(), group_size=4), by_rows.flatten())
    order = torch.randperm(24)
    group = (torch.arange(24) // 4 * 7 - 3)[order]
    shuffled = group_advantage(rewards.flatten()[order], group=group)
    assert_within_rounding(shuffled, by_rows.flatten()[order], terms=1)  # each is rounded, of sums in another order


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["grpo", "rloo", "dr_grpo", "opo"])
@pytest.mark.parametrize("size", [1, 8, 13, 4096])
def test_the_kernel_matches_the_reference(mode: Any, size: int) -> None:
    rewards = torch.randn(1001, size, device="cuda")
    options = {"lengths": torch.randint(0, 9, rewards.shape, device="cuda")} if mode == "opo" else {}
    found = group_advantage(rewards, mode=mode, implementation="triton", **options)
    want = group_advantage(rewards, mode=mode, implementation="reference", **options)
    assert_advantages_as_exact(found, want, rewards)


def test_groups_of_different_sizes_are_normalised_each_by_itself() -> None:
    found = group_advantage([1.0, 2.0, 5.0, 3.0], group=[0, 0, 9, 0], mode="rloo")
    assert found.tolist() == [-1.5, 0.0, 5.0, 1.5]


def test_opo_takes_the_mean_weighted_by_length_as_baseline() -> None:
    rewards, lengths = torch.randn(3, 4), torch.randint(1, 9, (3, 4))
    wide = rewards.double()
    baseline = torch.stack([(lengths[row] * wide[row]).sum() / lengths[row].sum() for row in range(3)])
    assert_rounded_once(group_advantage(rewards, mode="opo", lengths=lengths), wide - baseline[:, None])
    assert group_advantage([[2.5]], mode="opo", lengths=[[7]]).tolist() == [[2.5]]


def test_reinforce_plus_plus_whitens_over_tokens_after_the_group_mean() -> None:
    rewards, lengths = torch.randn(3, 4), torch.randint(0, 9, (3, 4))
    centred = (rewards.double() - rewards.double().mean(1, keepdim=True)).flatten()
    per_token = torch.cat([value.expand(count) for value, count in zip(centred, lengths.flatten(), strict=True)])
    want = (centred - per_token.mean()) / (per_token.std() + 1e-6)
    found = group_advantage(rewards, mode="reinforce++", lengths=lengths)
    assert_rounded_once(found.flatten(), want)


@pytest.mark.parametrize("mode", ["opo", "reinforce++"])
def test_responses_without_a_token_give_finite_advantages(mode: Any) -> None:
    rewards = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    found = group_advantage(rewards, mode=mode, lengths=torch.zeros(2, 2, dtype=torch.int64))
    assert found.isfinite().all()


@pytest.mark.parametrize("mode", ["grpo", "rloo", "dr_grpo"])
def test_equal_rewards_give_exactly_zero_and_one_alone_keeps_its_reward(mode: str) -> None:
    assert group_advantage(torch.full((3, 7), 0.1), mode=mode).count_nonzero() == 0
    alone = torch.tensor([[2.5 / (1 + 1e-6) if mode == "grpo" else 2.5]], dtype=torch.float64)
    assert_rounded_once(group_advantage([[2.5]], mode=mode), alone)


@pytest.mark.parametrize("reward", [0.1, 0.7, -1 / 3])
@pytest.mark.parametrize("mode", MODES)
def test_equal_rewards_give_exactly_zero_without_float64(
    mode: Any, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "double", torch.Tensor.float)  # as with torch_npu
    rewards, lengths = torch.full((3, 11), reward), torch.arange(1, 34).view(3, 11)
    by_length = mode in ("opo", "reinforce++")
    found = group_advantage(rewards, mode=mode, lengths=lengths if by_length else None)
    assert found.count_nonzero() == 0
    shuffled = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    group, length = (shuffled % 4).square(), lengths.flatten() if by_length else None
    assert group_advantage(rewards.flatten(), group=group, mode=mode, lengths=length).count_nonzero() == 0


def test_no_rewards_give_no_advantages() -> None:
    assert group_advantage(torch.zeros(0), group_size=4).shape == (0,)
    assert group_advantage([], group=[]).shape == (0,)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rewards": [[1.0, math.nan]]}, r"rewards must be finite; got nan at \[0, 1\]. Give such a response a reward"),
        ({"rewards": [1.0, math.inf], "group_size": 2}, r"rewards must be finite; got inf at \[1\]"),
        (
            {"rewards": [[1.0, 2.0], [3.0]]},
            r"rows of equal length; .* pass \[N\] and group=; torch.as_tensor: exp",
        ),
        (
            {"rewards": None},
            r"rewards must be numbers, \[N\] or .*; torch.as_tensor: Could not infer dtype",
        ),
        ({"rewards": torch.ones(1, 2) + 1j}, r"rewards must be numbers, .*; got torch.complex64"),
        (
            {"rewards": torch.ones(1, 2).to_sparse()},
            "rewards must be dense; got torch.sparse_coo",
        ),
        ({"rewards": torch.zeros(2, 2, 2)}, r"rewards must be \[N\] or \[P, n\]; got \[2, 2, 2\]"),
        ({"rewards": [1.0, 2.0]}, r"say the groups in one way: .* got rewards \[2\], group_size=None, group not given"),
        ({"rewards": [[1.0, 2.0]], "group_size": 2}, "say the groups in one way"),
        ({"rewards": [1.0, 2.0, 3.0], "group_size": 2}, "group_size=2 does not divide 3 rewards"),
        ({"rewards": [1.0, 2.0, 3.0], "group_size": 0}, "group_size=0 does not divide 3 rewards"),
        ({"rewards": [1.0, 2.0], "group": [0]}, r"group must be \[2\]; got \[1\]"),
        ({"rewards": [1.0, 2.0], "group": [0.0, 0.5]}, r"group must be \[N\] integers; got torch.float32"),
        ({"rewards": [1.0, 2.0], "group": [True, False]}, r"group must be \[N\] integers; got torch.bool"),
        ({"rewards": [1.0, 2.0], "group": ["a", "b"]}, r"group must be \[N\] integers; torch.as_tensor: too many dim"),
        ({"rewards": [1.0, 2.0], "group": [[0], [0, 1]]}, r"group must be \[N\] integers; torch.as_tensor: expected"),
        (
            {"rewards": [[1.0]], "mode": "ppo"},
            r"mode must be one of grpo, rloo, dr_grpo, opo, reinforce\+\+; got 'ppo'",
        ),
        ({"rewards": [[1.0]], "mode": "opo"}, "mode 'opo' needs lengths=, the tokens of each response"),
        ({"rewards": [[1.0]], "lengths": [[3]]}, "mode 'grpo' takes no lengths"),
        (
            {"rewards": [[1.0, 2.0]], "mode": "opo", "lengths": [1, 2]},
            r"lengths must have the shape of rewards, \[1, 2\]; got \[2\]",
        ),
        (
            {"rewards": [[1.0, 2.0], [3.0, 4.0]], "mode": "opo", "lengths": [[1, 2], [3]]},
            "lengths must be numbers of tokens in the shape of rewards; torch.as_tensor: expected",
        ),
        (
            {"rewards": [[1.0, 2.0]], "mode": "reinforce++", "lengths": [[1, -2]]},
            r"lengths must be finite and >= 0; got -2 at \[0, 1\]",
        ),
        (
            {"rewards": [[1.0, 2.0]], "mode": "opo", "lengths": [[1.0, math.inf]]},
            r"lengths must be finite and >= 0; got inf at \[0, 1\]",
        ),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        group_advantage(**arguments)  # type: ignore[arg-type]
