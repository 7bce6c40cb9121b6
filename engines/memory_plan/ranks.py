"""The memory that one of several ranks of FSDP2 holds, derived from the trace of a module that is alone on its device.

Parameters, gradients and optimizer states are cut; what is gathered comes on top: the root's own parameters from the
first forward to the last backward, and the parameters of two groups of blocks, as one is gathered while another is
computed with. Whole gradients are held from the first micro-batch of a step to its last, unless each is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.engines.fsdp2.gather_groups import gather_groups
from rlcore.engines.fsdp2.sharding import Sharding
from rlcore.nn import TrainModule

_REDUCED_BYTES = 4
"""Gradients are exchanged, and held, in float32."""


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """Bytes that a rank gathers and exchanges."""

    weights: int
    """Parameters in the compute dtype."""
    exchange: int
    """Gradients of a group on their way, beside its shards."""
    whole_gradients: int
    """Gradients of all parameters."""


def gathered(module: TrainModule, sharding: Sharding) -> GatheredBytes:
    """Return what one rank of several gathers of a module on the meta device."""
    classes = set(module.wrap_classes())
    blocks = {name: block for name, block in module.named_modules() if name and type(block).__name__ in classes}
    dtype = sharding.torch_compute_dtype
    groups = gather_groups(module, blocks, dtype, sharding.gather_bytes)
    in_blocks = {parameter for group in groups for block in group for parameter in block.parameters()}
    root = [parameter for parameter in module.parameters() if parameter not in in_blocks]
    sizes = [_num_values(parameter for block in group for parameter in block.parameters()) for group in groups]
    largest = max(sizes, default=0)
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    of_group = max(
        (_num_values(p for b in group for p in b.parameters() if p in trained) for group in groups), default=0
    )
    return GatheredBytes(
        weights=(_num_values(root) + (2 if len(groups) > 1 else 1) * largest) * dtype.itemsize,
        exchange=of_group * (dtype.itemsize + _REDUCED_BYTES),
        whole_gradients=_num_values(trained) * _REDUCED_BYTES,
    )


def _num_values(parameters: object) -> int:
    return sum(parameter.numel() for parameter in set(parameters))  # type: ignore[call-overload]
