"""A weight that is a DTensor, such as a parameter of FSDP2: gathered for the call, its gradient sharded again.

Every rank scores its own rows, so its gradient of the weight is one term of a sum over the ranks of the mesh:
``Partial``. The sum goes back to the parameter's placements: reduce-scattered where it is sharded, all-reduced where
it is replicated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from rlcore.errors import InvalidInputError


def gathered(name: str, shard: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole of ``shard`` in ``dtype`` on every rank of its mesh; its gradient is summed in its own.

    Raises:
        InvalidInputError: its values are still to be summed.
    """
    assert isinstance(shard, DTensor)
    if any(placement.is_partial() for placement in shard.placements):
        raise InvalidInputError(
            f"{name} has placements {shard.placements}: its values are not summed yet; redistribute it first"
        )
    whole: Tensor = _Gathered.apply(shard, dtype)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: DTensor, dtype: torch.dtype) -> Tensor:
        ctx.mesh, ctx.placements, ctx.dtype = shard.device_mesh, shard.placements, shard.dtype
        lowered = shard.detach().to(dtype)
        assert isinstance(lowered, DTensor)
        whole: Tensor = lowered.full_tensor()
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[DTensor, None]:
        partial = DTensor.from_local(g.to(ctx.dtype), ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(placements=ctx.placements), None
