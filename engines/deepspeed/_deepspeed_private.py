"""The private names of DeepSpeed 0.19.8 that the executor needs, and the type of its engine.

``partitions.py`` has besides those of a partitioned parameter: ``ds_tensor``, ``ds_numel`` and ``ds_shape``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

T = TypeVar("T")


class ZeroEngine(Protocol):
    """The members of ``deepspeed.DeepSpeedEngine`` that are used. It has no annotations of its own."""

    optimizer: Any
    """DeepSpeed's optimizer around that of the module."""

    def __call__(self, compute: Callable[[], T]) -> T: ...

    def backward(self, loss: Tensor) -> object: ...

    def step(self) -> None: ...

    def get_global_grad_norm(self) -> Tensor | float: ...

    def destroy(self) -> None: ...


def offloader_of(zero_optimizer: Any) -> Any:
    """Return the part of ZeRO 3 that gathers parameters; it stands in the optimizer's place where there is none."""
    return getattr(zero_optimizer, "parameter_offload", zero_optimizer)


def set_inner_optimizer(engine: Any, optimizer: Optimizer) -> None:
    """Let DeepSpeed's optimizer step by another one of torch's, whose groups have its flat tensors."""
    engine.basic_optimizer = engine.client_optimizer = engine.optimizer.optimizer = optimizer


def leave_overflow_to_the_norm(zero_optimizer: Any) -> None:
    """Leave out the search of ZeRO 2 in bfloat16 for infinities in each gradient, a few kernels a parameter.

    The norm that is computed next is not finite if one of them is not, and by it no step is taken.
    """
    zero_optimizer.check_overflow = lambda **_: None


def partition_all(zero_optimizer: Any) -> None:
    """Free all gathered parameters of ZeRO 3, those that persist as well: the next forward gathers them."""
    offloader_of(zero_optimizer).partition_all_parameters()


def forget_forward(zero_optimizer: Any) -> None:
    """Let ZeRO 3 begin anew after a forward or backward that has failed within some module."""
    from deepspeed.runtime.zero import parameter_offload

    del parameter_offload.FWD_MODULE_STACK[1:]
    coordinator = offloader_of(zero_optimizer).get_param_coordinator()
    coordinator.release_backward_leftovers()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def forget_gradients(zero_optimizer: Any, stage: int) -> None:
    """Drop all that ZeRO has summed up since its last step, also in the midst of a backward."""
    while zero_optimizer._backward_active_depth > 0:
        zero_optimizer.exit_backward()
    zero_optimizer.clear_backward_seen_flag()
    if stage == 3:
        for bucket in zero_optimizer.ipg_buckets.values():
            bucket.clear_params()
        zero_optimizer.params_already_reduced = dict.fromkeys(zero_optimizer.params_already_reduced, False)
        zero_optimizer.micro_step_id = 0
        zero_optimizer._epilogue_ran_this_backward = False
        summed = zero_optimizer.grad_partitions_flat_buffer
        if summed.untyped_storage().nbytes():
            summed.zero_()  # a parameter without a gradient in the next step would be stepped by that of this one
        return
    for bucket in zero_optimizer.ipg_buckets.values():
        bucket.clear()
    zero_optimizer.params_already_reduced = [False] * len(zero_optimizer.params_already_reduced)
    zero_optimizer.micro_step_id = -1
    zero_optimizer._release_preflattened_grad_buffers()
    for number in range(len(zero_optimizer.bit16_groups)):
        zero_optimizer.averaged_gradients[number] = zero_optimizer.all_grad_tensors[number] = None


def masters(zero_optimizer: Any, stage: int) -> list[Tensor]:
    """Return the flat float32 weights of this rank that the optimizer steps, one for each parameter group."""
    found = (
        zero_optimizer.fp32_partitioned_groups_flat if stage == 3 else zero_optimizer.single_partition_of_fp32_groups
    )
    return list(found)


def gradient_buffers(zero_optimizer: Any, stage: int) -> Iterator[Tensor]:
    """Yield the tensors, besides ``parameter.grad``, in which ZeRO holds gradients between two calls."""
    if stage == 3:
        yield zero_optimizer.grad_partitions_flat_buffer
        yield from (bucket.buffer for bucket in zero_optimizer.ipg_buckets.values() if bucket.buffer is not None)
        return
    for summed in (*zero_optimizer.averaged_gradients.values(), *zero_optimizer.all_grad_tensors.values()):
        yield from summed or ()
    for group in zero_optimizer.bit16_groups:
        yield from (one.grad_accum for one in group if one.grad_accum is not None)


def elements(
    zero_optimizer: Any, stage: int, groups: list[list[nn.Parameter]]
) -> Iterator[tuple[nn.Parameter, int, int, int, int]]:
    """Yield for each parameter of the optimizer where this rank has elements of it.

    Yields:
        The parameter, the number of its flat tensor, the first element there, and the first and the end in the
        parameter, numbered row by row. A rank may have none.
    """
    rank = dist.get_rank()
    if stage == 3:
        for number, group in enumerate(zero_optimizer.fp16_groups):
            offset = 0
            for parameter in group:
                chunk = parameter.ds_tensor.ds_numel
                start = min(parameter.ds_numel, chunk * rank)
                yield parameter, number, offset, start, min(parameter.ds_numel, start + chunk)
                offset += chunk
        return
    for number, group in enumerate(zero_optimizer.bit16_groups):
        size, first = zero_optimizer.single_partition_of_fp32_groups[number].numel(), 0
        for parameter in group:
            numel = parameter.numel()
            start = min(max(rank * size - first, 0), numel)
            stop = min(max((rank + 1) * size - first, 0), numel)
            yield parameter, number, min(max(first + start - rank * size, 0), size), start, stop
            first += numel


def publish_masters(zero_optimizer: Any, stage: int) -> None:
    """Give the weights that the module computes with the values of those that the optimizer steps, on all ranks."""
    if stage < 3:
        zero_optimizer.update_lp_params()
        return
    pairs = zip(zero_optimizer.fp16_partitioned_groups_flat, zero_optimizer.fp32_partitioned_groups_flat, strict=True)
    for computed, stepped in pairs:
        computed.data.copy_(stepped.data)
