"""Blocks that FSDP gathers together.

For every exchange the host runs some hundred lines of Python, which take it as long as a GPU works on a block of 50
million parameters: where each block is gathered alone the device waits for the host. Larger groups are fewer exchanges,
each nearer to the rate of the link, for the memory of two groups instead of two blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlcore.compute_dtype import ComputeDtype


def gather_groups(
    module: nn.Module, blocks: Mapping[str, nn.Module], compute_dtype: torch.dtype, most_bytes: int
) -> list[list[nn.Module]]:
    """Blocks that follow each other in a list, in groups of up to ``most_bytes``, or one block.

    Args:
        blocks: by name, the outermost first.

    Returns:
        The innermost first: FSDP leaves to an outer module what no inner one took.
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


def begin_anew(group: list[nn.Module], compute_dtype: torch.dtype) -> None:
    """Has torch before 2.13 do what later ones do, for a group that is sharded: there one of which a block failed, so
    that the rest did not run, is taken to be in use for ever, and what a block takes is cast for the first alone."""
    first, *others = group
    if not others or hasattr(FSDPModule, "reset_iter_state"):
        return
    unfinished = first._get_fsdp_state()._modules_to_run_forward  # type: ignore[operator]
    first.register_forward_pre_hook(lambda *_: unfinished.clear(), prepend=True)
    inputs = ComputeDtype(compute_dtype)
    for block in others:
        block.register_forward_pre_hook(lambda _, *given: inputs.of_inputs(given), with_kwargs=True)
