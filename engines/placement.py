"""Which devices an engine's workers get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.engines.runtime import current
from rlcore.errors import DeviceError, InvalidInputError, StateError
from rlcore.registry import get_device

if TYPE_CHECKING:
    from rlcore.engines.engine import Engine


def choose_devices(
    num_workers: int,
    devices: str | Sequence[str] | None,
    colocate_with: Engine | Iterable[Engine] | None,
    not_colocate_with: Engine | Iterable[Engine] | None,
) -> list[Any]:
    """One device for each worker: those named, else the other engine's, else the first that are not excluded.

    Raises:
        InvalidInputError: ``devices`` and ``colocate_with`` at once, or a wrong number of devices.
        StateError: an engine to place by that is not built.
        DeviceError: too few devices are left; names the engine that holds each of the others.
    """
    if devices is not None and colocate_with is not None:
        raise InvalidInputError("build() takes devices or colocate_with, not both")
    held = _held_by(not_colocate_with, "not_colocate_with")
    if colocate_with is not None:
        candidates = list(_held_by(colocate_with, "colocate_with"))
    elif devices is not None:
        candidates = [devices] if isinstance(devices, str) else list(devices)
    else:
        candidates = list(current().devices or _all_like(get_device()))
    names = [get_device(name).name for name in candidates]
    free = [name for name in names if name not in held]
    if devices is not None and len(names) != num_workers:
        raise InvalidInputError(f"this engine has {num_workers} workers; devices names {len(names)}: {names}")
    if len(free) < num_workers:
        taken = "; ".join(f"{name} is held by {held[name]}" for name in names if name in held) or "none is held"
        raise DeviceError(f"{num_workers} devices are needed and {len(free)} of {names} can be used: {taken}")
    return [get_device(name) for name in free[:num_workers]]


def _held_by(engines: Engine | Iterable[Engine] | None, argument: str) -> dict[str, str]:
    """Device name -> engine."""
    if engines is None:
        return {}
    listed = list(engines) if isinstance(engines, Iterable) else [engines]
    for engine in listed:
        if not engine.is_built:
            raise StateError(f"{argument} names {engine.label}, which is not built; call its build() first")
    return {device: engine.label for engine in listed for device in engine.devices}


def _all_like(device: Any) -> list[str]:
    return [f"{device.spec.name}:{index}" for index in range(device.count())]
