"""One tag of one worker: tensors that can leave the device and come back, guarded while they are away.

Weights are parameters. Buffers stay: they are small, and many (rotary tables) could not be made again after a release.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.engines.offload.guards import Guard
from rlcore.engines.offload.host_buffers import HostBuffers, distinct_storages
from rlcore.registry import get_device
from rlcore.types import OffloadReport


class Resident:
    """``tensors()`` lists what the tag holds now; ``guard(guard, state)`` guards its users while it is away."""

    def __init__(
        self, device: Any, tensors: Callable[[], Iterable[Tensor]], guard: Callable[[Guard, str], None]
    ) -> None:
        self._tensors = tensors
        self._guard_users = guard
        self._guard = Guard()
        self._host = HostBuffers(device)

    def onload(self) -> OffloadReport:
        report = self._host.onload()
        self._guard.lift()
        return report

    def offload(self) -> OffloadReport:
        report = self._host.offload(self._tensors())
        self._guard_users(self._guard, "offloaded")
        return report

    def meta(self) -> OffloadReport:
        report = self._host.release(self._tensors())
        self._guard.lift()
        self._guard_users(self._guard, "released")
        return report

    def forget(self) -> None:
        """Its tensors are about to be replaced or overwritten: nothing is away any more."""
        self.drop()
        self._guard.lift()

    def drop(self) -> None:
        """Nothing is to be brought back."""
        self._host.forget()

    @property
    def host_bytes(self) -> int:
        return self._host.host_bytes

    @property
    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage in distinct_storages(self._tensors()))


class GradResident(Resident):
    """Gradients. While away they are no longer ``parameter.grad``: autograd would add to a freed storage."""

    def __init__(self, device: Any, module: nn.Module, guard: Callable[[Guard, str], None]) -> None:
        super().__init__(device, lambda: (grad for _, grad in self._held()), guard)
        self._module = module
        self._away: list[tuple[nn.Parameter, Tensor]] = []

    def _held(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, p.grad) for p in self._module.parameters() if p.grad is not None]

    def offload(self) -> OffloadReport:
        away = self._held()
        report = super().offload()
        for parameter, _ in away:
            parameter.grad = None
        self._away = away
        return report

    def onload(self) -> OffloadReport:
        report = super().onload()
        for parameter, grad in self._away:
            meanwhile, parameter.grad = parameter.grad, grad
            if meanwhile is not None:  # a backward pass has run
                parameter.grad += meanwhile
        self._away = []
        return report

    def meta(self) -> OffloadReport:
        held = self._held()
        report = super().meta()
        for parameter, _ in held:
            parameter.grad = None
        self._away = []
        self.drop()  # gradients start from none, not from undefined memory
        return report


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Every tensor of every optimizer's state."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@contextlib.contextmanager
def offloaded(module: nn.Module, *optimizers: Optimizer) -> Iterator[OffloadReport]:
    """Keep a module's weights and its optimizers' states in host memory inside the ``with`` block.

    Needs no engine. Using the module or an optimizer inside raises ``StateError``.
    """
    device = get_device(next(module.parameters()).device)

    def tensors() -> Iterator[Tensor]:
        yield from module.parameters()
        yield from optimizer_tensors(optimizers)

    def guard(up: Guard, state: str) -> None:
        message = f"the tensors of this {type(module).__name__} are {state} inside `with offloaded(...)`"
        up.guard_module(module, message)
        up.guard_optimizers(optimizers, message)

    resident = Resident(device, tensors, guard)
    report = resident.offload()
    try:
        yield report
    finally:
        resident.onload()
