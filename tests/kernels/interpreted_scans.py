"""Scans and group advantages in Triton on the CPU, under TRITON_INTERPRET=1: see interpreted_triton.py.

test_triton.py runs this file in a process of its own; pytest does not collect it by itself.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from rlcore.errors import InvalidInputError
from rlcore.kernels import operands
from rlcore.kernels.returns import group_advantage as advantages
from rlcore.kernels.returns import triton_scan as triton_returns
from rlcore.kernels.token import triton_rows
from rlcore.ops import discounted_return, gae, group_advantage, token_logprob
from tests.accuracy import assert_as_accurate
from tests.kernels.plain import assert_advantages_as_exact

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy warns of inf - inf

GAMMA, LAM = 0.97, 0.9
LENGTHS = [0, 1, 1, 0, 2, 3, 64, 129, 0, 257, 1, 700, *[1] * 70]  # a sequence over many blocks, a block of many
EDGES = torch.tensor([0, *LENGTHS]).cumsum(0)
T = sum(LENGTHS)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 blocks; two rounds in the edges, and two in the blocks behind
    monkeypatch.setattr(triton_returns, "_TILE", {"BLOCK": 64, "WAYS": 8, "num_warps": 4})


def random_tokens() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    values, rewards = torch.randn(2, T, generator=generator)
    mask = torch.rand(T, generator=generator) < 0.7
    mask[4:7] = False  # a whole sequence that does not count
    mask[600:800] = False  # blocks in which nothing counts, inside a sequence
    return values, rewards, mask


@pytest.mark.parametrize(("kind", "lam"), [("bool", LAM), ("none", 0.0), ("int64", 1.0)])
def test_scans_match_float64(kind: str, lam: float) -> None:
    values, rewards, mask = random_tokens()
    mask = {"bool": mask, "none": None, "int64": mask.long()}[kind]
    options: dict[str, Any] = {"gamma": GAMMA, "cu_seqlens": EDGES.int() if kind == "none" else EDGES}
    sides = [
        (
            *gae(values.to(dtype), rewards.to(dtype), mask, lam=lam, implementation=name, **options),
            discounted_return(rewards.to(dtype), mask, implementation=name, **options),
        )
        for name, dtype in (("triton", torch.float32), ("reference", torch.float32), ("reference", torch.float64))
    ]
    for found, plain, exact in zip(*sides, strict=True):
        assert_as_accurate(found, plain, exact)
    returned = sides[0][2]
    if mask is not None:
        assert not returned[mask == 0].any()


def test_scans_of_strided_half_precision_and_of_padded_batches() -> None:
    values, rewards = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(6)).bfloat16()
    mask = torch.arange(150) < torch.tensor([150, 3, 0, 1, 70])[:, None]
    values, rewards = values[:, ::2], rewards[:, 1::2]
    sides = [
        gae(values.to(dtype), rewards.to(dtype), mask, gamma=GAMMA, lam=LAM, implementation=name)
        for name, dtype in (("triton", torch.bfloat16), ("reference", torch.bfloat16), ("reference", torch.float64))
    ]
    for found, plain, exact in zip(*sides, strict=True):
        assert_as_accurate(found, plain, exact)


def test_what_masked_tokens_hold_has_no_influence_on_a_scan() -> None:
    values, rewards, mask = random_tokens()
    options: dict[str, Any] = {"gamma": GAMMA, "lam": LAM, "cu_seqlens": EDGES, "implementation": "triton"}
    want = gae(values, rewards, mask, **options)
    values[~mask], rewards[~mask] = math.nan, math.inf
    for one, other in zip(gae(values, rewards, mask, **options), want, strict=True):
        assert torch.equal(one, other)


def test_edges_that_are_one_are_not_walked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    num_loads, load = 0, InterpreterBuilder.create_masked_load

    def counted(*arguments: Any) -> Any:
        nonlocal num_loads
        num_loads += 1
        return load(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    _, rewards, _ = random_tokens()
    counts = []
    for repeats in (1, 1000):  # of an edge inside, and of the last, as where cu_seqlens is padded
        edges = torch.cat((EDGES[:-1], EDGES[5:6].repeat(repeats), EDGES[-1:].repeat(repeats))).sort().values
        num_loads = 0
        found = discounted_return(rewards, gamma=GAMMA, cu_seqlens=edges, implementation="triton")
        counts.append(num_loads)
        plain, exact = (
            discounted_return(x, gamma=GAMMA, cu_seqlens=edges, implementation="scan")
            for x in (rewards, rewards.double())
        )
        assert_as_accurate(found, plain, exact)
    # The check of the edges reads each twice, 8 at a time; a walk would be a load for each.
    assert 0 < counts[0] < counts[1] < counts[0] + len(edges) / 2


@pytest.mark.parametrize("edges", [[0], [0, 0, 0]])
def test_a_scan_of_nothing(edges: list[int]) -> None:
    found = gae(torch.zeros(0), torch.zeros(0), cu_seqlens=torch.tensor(edges), implementation="triton")
    assert found.advantages.shape == found.returns.shape == (0,)


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        ({"rewards": math.nan}, False),
        ({"values": -math.inf}, False),
        ({"edges": [0, 40, 30, T]}, False),
        ({"edges": [1, T]}, False),
        ({"edges": [0, T - 1]}, False),
        ({"edges": [0, T + 1]}, False),
    ],
    ids=str,
)
def test_the_kernels_find_bad_input_by_themselves(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], is_valid: bool
) -> None:
    values, rewards, _ = random_tokens()
    for name, tensor in (("values", values), ("rewards", rewards)):
        tensor[777] = change.get(name, 0.0)
    edges = torch.tensor(change.get("edges", [0, T]))
    monkeypatch.setattr(triton_returns, "is_checked_on_device", lambda tensor: True)
    if is_valid:
        gae(values, rewards, cu_seqlens=edges, implementation="triton")
    else:
        with pytest.raises(InvalidInputError, match="gae: its inputs must be finite, and cu_seqlens rise from 0"):
            gae(values, rewards, cu_seqlens=edges, implementation="triton")


def assert_triton_matches(rewards: torch.Tensor, mode: Any, options: dict[str, Any]) -> None:
    found = group_advantage(rewards, mode=mode, implementation="triton", **options)
    want = group_advantage(rewards, mode=mode, implementation="reference", **options)
    assert_advantages_as_exact(found, want, rewards)


@pytest.mark.parametrize("mode", ["grpo", "rloo", "dr_grpo", "opo"])
@pytest.mark.parametrize("shape", [(37, 5), (300, 8), (9, 1), (2, 2049), (0, 4)], ids=str)
def test_advantages_of_groups_match_the_reference(mode: Any, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(7)
    rewards = torch.randn(shape, generator=generator)
    options = {"lengths": torch.randint(0, 9, shape, generator=generator)} if mode == "opo" else {}
    assert_triton_matches(rewards, mode, options)


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "opo"])
def test_rewards_of_a_common_offset_are_told_apart_as_in_float64(mode: Any, size: int) -> None:
    rewards = 1e6 + torch.randn(40, size, generator=torch.Generator().manual_seed(8))
    options = {"lengths": torch.arange(40 * size).view(40, size)} if mode == "opo" else {}
    assert_triton_matches(rewards, mode, options)


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("mode", ["grpo", "rloo", "dr_grpo"])
def test_equal_rewards_give_exactly_zero(mode: Any, size: int) -> None:
    for reward in (0.1, 1 / 3, -7e8):
        assert not group_advantage(torch.full((3, size), reward), mode=mode, implementation="triton").any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e25])
def test_the_kernel_finds_rewards_that_it_cannot_take(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    monkeypatch.setattr(advantages, "is_checked_on_device", lambda tensor: True)
    rewards = torch.zeros(600, 8)
    group_advantage(rewards, implementation="triton")
    rewards[577, 3] = wrong
    with pytest.raises(InvalidInputError, match="rewards must be finite, and in mode 'grpo' their variance below 3e38"):
        group_advantage(rewards, implementation="triton")


# -------------------------------------------------------------------------------------------------- launches

_LAUNCHED_NOTHING = re.compile(  # fill_ is that of the fixture that poisons memory
    r"aten\.(fill_|empty|new_empty|empty_like|empty_strided|view|_unsafe_view|_reshape_alias|detach|alias|select|slice|t|"
    r"transpose|expand|unsqueeze|unbind|split|is_pinned|_local_scalar_dense)\b"
)


class Launches(TorchDispatchMode):
    """Return what would be launched on an accelerator: the operations of torch, and the kernels by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        for module in (operands, advantages, sys.modules[token_logprob.__module__], triton_rows, triton_returns):
            monkeypatch.setattr(module, "is_checked_on_device", lambda tensor: True)
        monkeypatch.setattr(torch, "_assert_async", lambda *_: self.names.append("assert"))
        run = GridExecutor.__call__

        def counted(grid: Any, *arguments: Any, **options: Any) -> None:
            self.names.append(grid.fn.__name__)
            with _disable_current_modes():
                run(grid, *arguments, **options)

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _LAUNCHED_NOTHING.match(str(func)):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_operators_take_no_more_launches_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randn(2, 300)
    edges, mask = torch.tensor([0, 100, 300]), torch.rand(300) < 0.7
    logits, targets = torch.randn(5, 40, requires_grad=True), torch.arange(5)
    calls = {
        "group_advantage": (lambda: group_advantage(tokens[0].view(-1, 4)), 3),
        "gae": (lambda: gae(*tokens, mask, cu_seqlens=edges), 3),
        "discounted_return": (lambda: discounted_return(tokens[0], mask, cu_seqlens=edges), 3),
        "token_logprob": (lambda: token_logprob(logits.detach(), targets, with_entropy=True), 3),
        "token_logprob, padded": (lambda: token_logprob(logits.detach()[None], targets[None], with_entropy=True), 3),
        "token_logprob with its backward": (
            lambda: torch.autograd.grad(token_logprob(logits, targets).logprob, logits, torch.ones(5)),
            5,  # torch.ones is one of them
        ),
    }
    with Launches(monkeypatch) as seen:
        for name, (call, most) in calls.items():
            seen.names.clear()
            call()
            assert any(found.endswith("_kernel") for found in seen.names)
            assert len(seen.names) == most, f"{name}: {seen.names}"
