"""The contract of sharding strategies: all that a training step needs to know of how a module lies over the ranks.

``rlcore.engines.fsdp2.step`` runs micro-batches, losses and metrics over any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class ShardingStrategy(ABC):
    """How the parameters, gradients and optimizer states of one module lie over the ranks. All ranks call it alike."""

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

    @abstractmethod
    def step(self, max_norm: float | None, seen: Callable[[Tensor], None]) -> None:
        """Clip the gradients and step every optimizer, unless the norm of the gradients is not finite.

        Args:
            max_norm: gradients are scaled down to this norm over all ranks; None leaves them.
            seen: is called with the norm before clipping, a scalar on the device, as soon as it is known.
        """

    @abstractmethod
    def zero(self) -> None:
        """Drop all gradients."""
