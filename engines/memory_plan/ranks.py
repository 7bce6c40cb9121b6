"""The memory that one of several ranks of FSDP2 holds, derived from the trace of a module that is alone on its device.

Parameters, gradients and optimizer states are cut; what is gathered comes on top: the root's own parameters from the
first forward to the last backward, and a group of blocks twice, as the buffer of the exchange and as parameters. Where
``reshard_after_forward`` is False, all blocks are there from their forward on, beside one such buffer.

Whole gradients are held from the first micro-batch of a step to its last. There each group's are exchanged once its
backward is done and its activations are gone, and freed then: what takes most is either the activations or the largest
exchange. Where each micro-batch is exchanged, exchanges of two groups may overlap with the backward of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rlcore.engines.fsdp2.gather_groups import gather_groups
from rlcore.engines.fsdp2.sharding import Sharding, blocks_of
from rlcore.nn import TrainModule
from rlcore.packed.sequence_parallel import SequenceGroup

_REDUCED_BYTES = 4
"""Gradients are exchanged, and held, in float32."""


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """Bytes that a rank gathers and exchanges."""

    weights: int
    """Parameters in the compute dtype."""
    exchange: int
    """The gradients of a group, the buffer in which they are sent, and this rank's part of their sum."""
    overlapping: int
    """The gradients of a group, and the buffers of the two exchanges before, that are there while a group computes."""
    whole_gradients: int
    """Gradients of all parameters."""


class FirstOfGroup(SequenceGroup):
    """The ranks that share each packed row, as the first of them sees it in a plan: there are no processes.

    On the meta device an exchange between them is an operator that has a size alone.
    """

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.name = 0, size, f"planned group of {size}"


def gathered(module: TrainModule, sharding: Sharding, shards: int) -> GatheredBytes:
    """Return what one rank of several gathers of a module on the meta device.

    Args:
        shards: the ranks over which the module is cut.
    """
    dtype = sharding.torch_compute_dtype
    groups = gather_groups(module, blocks_of(module), dtype, sharding.gather_bytes)
    sets = [{parameter for block in group for parameter in block.parameters()} for group in groups]
    in_blocks = set().union(*sets)
    root = {parameter for parameter in module.parameters() if parameter not in in_blocks}
    largest = max(map(_num_values, sets), default=0)
    kept = largest if sharding.reshard_after_forward else _num_values(in_blocks)
    of_group = max((_num_values(_trained(one)) for one in sets), default=0)
    cast = 0 if dtype == sharding.torch_dtype else largest * dtype.itemsize // shards
    return GatheredBytes(
        weights=(_num_values(root) + kept + largest) * dtype.itemsize + cast,
        exchange=of_group * (dtype.itemsize + _REDUCED_BYTES) + of_group * _REDUCED_BYTES // shards,
        overlapping=of_group * (dtype.itemsize + 2 * _REDUCED_BYTES),
        whole_gradients=_num_values(_trained(set(module.parameters()))) * _REDUCED_BYTES,
    )


def _trained(parameters: set[nn.Parameter]) -> set[nn.Parameter]:
    return {parameter for parameter in parameters if parameter.requires_grad}


def _num_values(parameters: set[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
