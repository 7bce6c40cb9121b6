"""The device that tensors on torch's meta device stand for, while a step is planned.

A plan runs the real code of a step on meta tensors, which have sizes and no memory. Code that chooses by the device
asks here which device is meant. Outside of a plan nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from rlcore.device import Device


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device that need not be here."""

    type: str
    """``torch.device.type`` of its tensors."""
    cores: int = 0
    """Its multiprocessors; 0 on a host."""
    arch: int = 0
    """Its architecture as Triton numbers it, such as 90; 0 where Triton builds nothing."""


def as_planned(device: Device) -> PlannedDevice:
    """Return the facts of a device that is here."""
    facts = device.properties()
    major, _, minor = facts.capability.partition(".")
    arch = int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else int(not device.spec.is_host)
    return PlannedDevice(device.type, facts.cores, 0 if device.spec.is_host else arch)


Apart = Callable[[], AbstractContextManager[object]]
"""Makes a context for what a process does once, which is no part of the step that it is planned in."""

_planned: ContextVar[PlannedDevice | None] = ContextVar("rlcore_planned_device", default=None)
_apart: ContextVar[Apart | None] = ContextVar("rlcore_planned_apart", default=None)


@contextmanager
def planning_for(device: PlannedDevice, apart: Apart | None = None) -> Iterator[None]:
    """Let meta tensors of this thread stand for tensors on ``device``."""
    tokens = _planned.set(device), _apart.set(apart)
    try:
        yield
    finally:
        _planned.reset(tokens[0])
        _apart.reset(tokens[1])


def apart_from_step() -> AbstractContextManager[object] | None:
    """Return the context for what happens once, whatever step is planned now; None where nobody counts memory."""
    apart = _apart.get()
    return None if apart is None else apart()


def planned_device(device: torch.device) -> PlannedDevice | None:
    """Return the device for which a meta tensor stands; None for every other tensor, and outside of a plan."""
    return _planned.get() if device.type == "meta" else None


def type_meant(device: torch.device) -> str:
    """Return ``device.type``, or the type of the device for which a meta tensor stands."""
    found = planned_device(device)
    return device.type if found is None else found.type
