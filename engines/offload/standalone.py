"""Offload without an engine: any modules and optimizers of one process, in a ``with`` block or by calls with tags.

away = rlcore.Offloader(model, optimizer)
away.offload("optimizer", "grads")
away.onload()

with rlcore.offloaded(optimizer): ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.engines.offload.file_backed import read_into_memory
from rlcore.engines.offload.group import GradientGroup, OffloadGroup, optimizer_tensors, swap_groups
from rlcore.engines.offload.guards import Guard
from rlcore.engines.residency import State
from rlcore.errors import InvalidInputError
from rlcore.registry import get_device
from rlcore.types import OffloadReport

_away: set[Offloader] = set()
"""The ones that hold values in host memory: their tensors need them, also when no program refers to them any more."""


class Offloader:
    """Moves the tensors of modules and optimizers to host memory and back, by tag, as engines do.

    Tags: ``weights`` (the parameters of the modules), ``optimizer`` (the states of the optimizers) and ``grads`` (the
    gradients of the modules). An object without modules has only ``optimizer``, one without optimizers lacks it. What
    is away raises ``StateError`` when it is used, with the call that brings it back; the tensors themselves must not
    be touched. What is away is kept until ``onload``, even if nothing refers to this object any more.

    Args:
        owners: modules and optimizers with parameters on one device. An optimizer may be wrapped, as by accelerate's
            ``AcceleratedOptimizer``: the one that it wraps is meant.

    Raises:
        InvalidInputError: something else, or nothing that has parameters.
    """

    def __init__(self, *owners: nn.Module | Optimizer) -> None:
        modules, self._optimizers = _sorted(owners, "Offloader")
        self._module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._device = get_device(next(_parameters(modules, self._optimizers)).device)
        self._groups = self._make_groups()

    @property
    def state(self) -> dict[str, State]:
        """Tag -> ``loaded`` or ``offloaded``."""
        return {tag: State.OFFLOADED if group.is_away else State.LOADED for tag, group in self._groups.items()}

    def offload(self, *tags: str) -> dict[str, OffloadReport]:
        """Move tags (all when none is named) to host memory and free their device memory; all of them, or none.

        Returns:
            Tag -> the report of its move; a tag that was away is not in it.

        Raises:
            InvalidInputError: a tag that this object does not have.
            DeviceError: there is too little host memory.
            StateError, UnsupportedError: a storage cannot be freed.
        """
        leaving = {tag: self._groups[tag] for tag in self._checked(tags) if not self._groups[tag].is_away}
        if "weights" in leaving:
            read_into_memory(self._module.parameters(), self._device)
        if "optimizer" in leaving:
            read_into_memory(optimizer_tensors(self._optimizers), self._device)
        reports = swap_groups(list(leaving.values()), [])
        if leaving:
            _away.add(self)
        return dict(zip(leaving, reports, strict=True))

    def onload(self, *tags: str) -> dict[str, OffloadReport]:
        """Bring tags (all when none is named) back to the device; as ``offload`` in all else."""
        returning = {tag: self._groups[tag] for tag in self._checked(tags) if self._groups[tag].is_away}
        reports = swap_groups([], list(returning.values()))
        if not any(group.is_away for group in self._groups.values()):
            _away.discard(self)
        return dict(zip(returning, reports, strict=True))

    def _checked(self, tags: Sequence[str]) -> list[str]:
        for tag in tags:
            if tag not in list(self._groups):  # a list, as a wrong tag may have no hash
                raise InvalidInputError(f"this Offloader has the tags {', '.join(self._groups)}; got {tag!r}")
        return [tag for tag in self._groups if not tags or tag in tags]

    def _make_groups(self) -> dict[str, OffloadGroup]:
        module, optimizers, device = self._module, self._optimizers, self._device
        of_modules = next(module.parameters(), None) is not None
        name = type(module).__name__ if of_modules else type(optimizers[0]).__name__

        def guard_weights(guard: Guard, state: str) -> None:
            message = f"the weights of this {name} are {state}; {_remedy('weights')}"
            guard.guard_module(module, message)
            guard.guard_optimizers(optimizers, message)

        def guard_optimizer(guard: Guard, state: str) -> None:
            guard.guard_optimizers(optimizers, f"the optimizer of this {name} is {state}; {_remedy('optimizer')}")

        def guard_grads(guard: Guard, state: str) -> None:
            message = f"the grads of this {name} are {state}; {_remedy('grads')}"
            guard.guard_steps(optimizers, message)
            if any(parameter.grad is not None for parameter in module.parameters()):
                guard.guard_zero_grad([module, *optimizers], message)

        groups = {}
        if of_modules:
            groups["weights"] = OffloadGroup(device, module.parameters, guard_weights)
        if optimizers:
            groups["optimizer"] = OffloadGroup(device, lambda: optimizer_tensors(optimizers), guard_optimizer)
        if of_modules:
            groups["grads"] = GradientGroup(device, module, guard_grads)
        return groups


@contextlib.contextmanager
def offloaded(*owners: nn.Module | Optimizer) -> Iterator[OffloadReport]:
    """Keep modules' weights and optimizers' states in host memory inside the ``with`` block.

    No engine is needed. Inside, the modules and every optimizer of their parameters raise ``StateError`` when they are
    used; the tensors themselves must not be touched. The host memory is kept for the next time.

    Args:
        owners: modules, optimizers or both, as ``Offloader`` takes them. Of optimizers alone the weights stay.

    Raises:
        InvalidInputError: a module without parameters, or something else than modules and optimizers.
    """
    modules, optimizers = _sorted(owners, "offloaded()")
    away = Offloader(*modules, *optimizers)
    tags = [tag for tag in away.state if tag != "grads"]
    report = _joined(away.offload(*tags).values())
    try:
        yield report
    finally:
        away.onload()


def _remedy(tag: str) -> str:
    return f"call onload({tag!r}) of its Offloader, or leave the `with rlcore.offloaded(...)` block"


def _sorted(owners: Iterable[object], taker: str) -> tuple[list[nn.Module], list[Optimizer]]:
    """Return the modules, and the optimizers without their wrappers."""
    modules: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    for owner in owners:
        if isinstance(owner, nn.Module):
            modules.append(owner)
        elif isinstance(owner, Optimizer):
            optimizers.append(_unwrapped(owner, taker))
        else:
            raise InvalidInputError(
                f"{taker} takes torch.nn.Module and torch.optim.Optimizer, got {type(owner).__name__}; give each by "
                "itself, and leave schedulers out"
            )
    if next(_parameters(modules, optimizers), None) is None:
        names = " and ".join(type(owner).__name__ for owner in owners)
        raise InvalidInputError(
            f"{taker} takes modules with parameters, or optimizers; "
            + (f"this {names} has none" if names else "got none")
        )
    return modules, optimizers


def _unwrapped(optimizer: Optimizer, taker: str) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper or another's, which is an ``Optimizer`` only by its class."""
    while "param_groups" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise InvalidInputError(
                f"{taker} takes optimizers of torch, or wrappers with one as .optimizer; this "
                f"{type(optimizer).__name__} wraps {type(inner).__name__}, which moves its own states"
            )
        optimizer = inner
    return optimizer


def _parameters(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for module in modules:
        yield from module.parameters()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _joined(reports: Collection[OffloadReport]) -> OffloadReport:
    """Return the report of one transfer from those of its parts, whose seconds all count from its start."""
    return OffloadReport(
        moved_bytes=sum(report.moved_bytes for report in reports),
        freed_device_bytes=sum(report.freed_device_bytes for report in reports),
        seconds=max(report.seconds for report in reports),
        pinned=all(report.pinned for report in reports if report.moved_bytes),
        first_use=any(report.first_use for report in reports),
    )
