"""The contract of sharding strategies: all that a training step needs to know of how a module lies over the ranks.

``rlcore.engines.executors.step`` runs micro-batches, losses and metrics over any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from rlcore.compute_dtype import stop_computing
from rlcore.device import Device
from rlcore.engines.executors.clipping import clip_and_step, total_norm
from rlcore.engines.executors.gradient_sums import GradientSums
from rlcore.nn import TrainModule, optimizers_of
from rlcore.packed.sequence_parallel import SequenceGroup
from rlcore.routing.routers import Router, routers_of

T = TypeVar("T")


class ShardingStrategy(ABC):
    """How the parameters, gradients and optimizer states of one module lie over the ranks. All ranks call it alike.

    Args:
        device: the rlcore device; its profiler names the phases.
        sequence_group: the ranks that share the rows of ``hidden_states``; None where each rank has rows of its own.
        num_alike: neighbouring ranks that compute the same rows (tensor parallelism).
    """

    def __init__(
        self,
        module: TrainModule,
        device: Device,
        sequence_group: SequenceGroup | None = None,
        num_alike: int = 1,
    ) -> None:
        self.module = module
        self.device = device
        self.sequence_group = sequence_group
        self.num_alike = num_alike

    @cached_property
    def sums(self) -> GradientSums:
        """The gradients of the module's parameters, as this rank holds them."""
        return GradientSums(self.module.parameters())

    @cached_property
    def routers(self) -> list[Router]:
        """The routers of the module; none of a dense one. They are kept, as to find them takes a millisecond."""
        return routers_of(self.module)

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """Return the context of all forward and backward passes of one call.

        After it no parameter is gathered, also after an error, whose gradients do not count in a later step.
        """

    def forward(self, compute: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        """Return ``compute()``, a forward pass of the module, inside of which the module's weights can be read.

        Args:
            compute: returns the tensor where a backward may begin, and anything else.
        """
        return compute()

    @abstractmethod
    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradients of ``loss`` to those of the step, of which they are a sum over micro-batches and ranks.

        Args:
            is_last: no micro-batch follows before ``step``.
        """

    def step(self, max_norm: float | None, seen: Callable[[Tensor], None]) -> None:
        """Clip the gradients and step every optimizer, unless the norm of the gradients is not finite.

        Args:
            max_norm: gradients are scaled down to this norm over all ranks; None leaves them.
            seen: is called with the norm before clipping, a scalar on the device, as soon as it is known.
        """
        phase = self.device.profiler.range
        self.sums.narrow()
        with phase("train_batch: clip"):
            gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
            norm = total_norm(gradients)
        with phase("train_batch: metrics"):
            seen(norm)
        with phase("train_batch: optimizer"):
            clip_and_step(optimizers_of(self.module).values(), gradients, norm, max_norm)

    def zero(self) -> None:
        """Drop all gradients, also of parameters that no optimizer has, which would count in the next norm."""
        self.module.zero_grad()
        for optimizer in optimizers_of(self.module).values():
            optimizer.zero_grad()
        self.sums.narrow()  # after an error they are wide

    @abstractmethod
    def release(self) -> None:
        """Free what is gathered: this rank holds its part of each parameter, and nothing else."""


class OneDevice(ShardingStrategy):
    """The module is whole on one device: nothing is gathered or exchanged."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.release()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if not is_last:
            self.sums.widen()

    def release(self) -> None:
        stop_computing(self.module)  # casts of parameters
