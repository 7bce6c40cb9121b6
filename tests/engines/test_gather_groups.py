"""The blocks that FSDP gathers together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlcore.engines.fsdp2.gather_groups import complete_hooks, gather_groups


class Block(nn.Module):
    def __init__(self, size: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.inner = inner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(10), Block(10), Block(30), Block(1), Block(5)])
        self.others = nn.Sequential(Block(1), Block(1))
        self.first, self.second = Block(1), Block(1)


def groups_of(model: nn.Module, most_bytes: int) -> list[list[str]]:
    blocks = {name: part for name, part in model.named_modules() if isinstance(part, Block)}
    names = {block: name for name, block in blocks.items()}
    groups = gather_groups(model, blocks, torch.bfloat16, most_bytes)
    return [[names[block] for block in group] for group in groups]


def test_neighbours_in_a_list_join_up_to_a_size() -> None:
    assert groups_of(Model(), 40) == [
        ["second"],
        ["first"],
        ["others.0", "others.1"],
        ["layers.3", "layers.4"],
        ["layers.2"],
        ["layers.0", "layers.1"],
    ]


def test_without_room_each_is_alone() -> None:
    assert [len(group) for group in groups_of(Model(), 0)] == [1] * 9


def test_inner_blocks_come_first_and_keep_to_themselves() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Block(1, inner=Block(1)), Block(1, inner=Block(1))])
    assert groups_of(model, 100) == [["layers.1.inner"], ["layers.0.inner"], ["layers.0", "layers.1"]]


class _State:
    """torch's state of a group."""

    def __init__(self, unfinished: set[nn.Module]) -> None:
        self._modules_to_run_forward = unfinished
        self.outputs: list[torch.Tensor] = []

    def _register_pre_backward_hook(self, output: torch.Tensor) -> torch.Tensor:
        self.outputs.append(output)
        return output


class _Sharded(nn.Linear):
    state: _State

    def _get_fsdp_state(self) -> _State:
        return self.state


def sharded_group(unfinished: set[nn.Module]) -> list[nn.Module]:
    group = [_Sharded(2, 2, dtype=torch.bfloat16) for _ in range(2)]
    state = _State(unfinished)
    for block in group:
        block.state = state
    return [*group]


def test_on_older_torch_a_pass_begins_anew_and_every_block_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    unfinished: set[nn.Module] = {nn.Linear(1, 1)}
    first, second = group = sharded_group(unfinished)
    complete_hooks(group, torch.bfloat16)
    second(torch.ones(1, 2))  # float32: it would be refused
    assert unfinished
    first(torch.ones(1, 2, dtype=torch.bfloat16))
    assert not unfinished


def test_the_backward_of_a_group_begins_at_any_block() -> None:
    group = sharded_group(set())
    complete_hooks(group, torch.bfloat16)
    outputs = [block(torch.ones(1, 2, dtype=torch.bfloat16)) for block in group]
    found = group[0].state.outputs  # type: ignore[union-attr]
    assert [id(output) for output in found] == [id(output) for output in outputs]
