"""Blocks that FSDP gathers together.

For every exchange the host runs some hundred lines of Python, which takes as long as a GPU works on a block of 50
million parameters: if each block is gathered alone, the device waits for the host. Larger groups mean fewer exchanges,
each nearer to the rate of the link. They take the memory of two groups instead of two blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlcore.compute_dtype import ComputeDtype
from rlcore.engines._torch_private import forget_forwards, fsdp_pre_backward


def gather_groups(
    module: nn.Module, blocks: Mapping[str, nn.Module], compute_dtype: torch.dtype, most_bytes: int
) -> list[list[nn.Module]]:
    """Return neighbouring blocks of a list in groups of up to ``most_bytes``; a larger block is a group alone.

    Args:
        blocks: by name, the outermost first.
        compute_dtype: dtype of the gathered parameters.

    Returns:
        Groups, the innermost first: FSDP gives an outer module the parameters that no inner one took.
    """
    groups: list[list[nn.Module]] = []
    latest: dict[str, list[nn.Module]] = {}
    for name, block in blocks.items():
        owner = name.rpartition(".")[0]
        group = latest.get(owner, [])
        is_in_list = isinstance(module.get_submodule(owner), nn.ModuleList | nn.Sequential)
        if not (group and is_in_list and _num_values([*group, block]) * compute_dtype.itemsize <= most_bytes):
            group = latest[owner] = []
            groups.append(group)
        group.append(block)
    return groups[::-1]


def _num_values(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def complete_hooks(group: list[nn.Module], compute_dtype: torch.dtype) -> None:
    """Let the backward of a sharded group begin at any of its blocks.

    torch lets it begin at the output of the last block, which need not be part of the loss, such as the unused last
    layer of a vision tower.
    """
    first, *others = group
    if not others:
        return
    prepare = fsdp_pre_backward(first)
    for block in group:
        block.register_forward_hook(lambda _, __, output: prepare(output))
    if hasattr(FSDPModule, "reset_iter_state"):
        return
    # Before torch 2.13, a group whose block failed, so that the others did not run, counted as in use for ever, and
    # only the inputs of the first block were cast.
    first.register_forward_pre_hook(lambda module, _: forget_forwards(module), prepend=True)
    inputs = ComputeDtype(compute_dtype)
    for block in others:
        block.register_forward_pre_hook(lambda _, *given: inputs.of_inputs(given), with_kwargs=True)
