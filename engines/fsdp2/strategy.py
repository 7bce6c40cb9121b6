"""The sharding strategy of the executor ``fsdp2`` on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlcore.device import Device
from rlcore.engines._torch_private import drop_unreduced_gradients
from rlcore.engines.executors.strategy import ShardingStrategy
from rlcore.engines.fsdp2.optimizers import check_sharded
from rlcore.engines.fsdp2.sharding import reshard
from rlcore.nn import TrainModule
from rlcore.packed.sequence_parallel import SequenceGroup


class Fsdp2Strategy(ShardingStrategy):
    """Parameters and their gradients are DTensors.

    Args:
        reduce_each: exchange gradients after each micro-batch; else after the last one.
    """

    def __init__(
        self,
        module: TrainModule,
        device: Device,
        sequence_group: SequenceGroup | None,
        *,
        num_alike: int,
        reduce_each: bool,
    ) -> None:
        super().__init__(module, device, sequence_group, num_alike)
        assert isinstance(module, FSDPModule)
        self._root: FSDPModule = module
        self._reduce_each = reduce_each

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop_gradients()
            if hasattr(self._root, "reset_iter_state"):  # newer torch
                self._root.reset_iter_state()
            raise
        finally:
            self._root.set_requires_gradient_sync(True)
            self.release()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._root.set_requires_gradient_sync(self._reduce_each or is_last)
        num_ranks = dist.get_world_size() // self.num_alike  # FSDP divides gradients by it
        (loss * num_ranks).backward()  # type: ignore[no-untyped-call]
        if self._reduce_each and not is_last:  # whole gradients FSDP itself adds up in float32
            self.sums.widen()

    def step(self, max_norm: float | None, seen: Callable[[Tensor], None]) -> None:
        check_sharded(self.module)  # a method of the module may have made others than there were at the build
        super().step(max_norm, seen)

    def release(self) -> None:
        reshard(self.module)

    def _drop_gradients(self) -> None:
        """Drop all gradients, exchanged or not. Nothing waits for other ranks here: this one alone may have failed."""
        self.release()  # of a gathered parameter, those that have been exchanged are not seen
        for parameter in self.module.parameters():
            parameter.grad = None
        for submodule in self.module.modules():
            if isinstance(submodule, FSDPModule):
                drop_unreduced_gradients(submodule)
