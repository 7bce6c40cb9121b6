"""The content of ``rlcore devices``: all kinds of devices, or all members of one device."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.deadline import CallOutcome, outcomes_within
from rlcore.device import Device
from rlcore.errors import DeviceError, PluginError, UnsupportedError, one_line
from rlcore.registry import get_device, launch, list_devices
from rlcore.settings import Settings
from rlcore.types import Capability, DeviceInfo, DeviceProperties


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device."""

    info: DeviceInfo
    visible_devices_variable: str | None
    visible_devices: list[str] | None
    """Ids that the variable names; None when it is not set."""
    ray_resource: str | None
    capabilities: dict[str, Capability] | None
    """None where the device is not available, so that its capabilities are unknown."""
    error: str
    """The reason why an available device has no capabilities."""

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**fields.pop("info"), **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One device."""

    name: str
    vendor: str
    properties: DeviceProperties
    simulation: dict[str, Any] | None
    """``Simulation.counted`` of the simulation below torch; None where the vendor's own libraries run."""
    capabilities: dict[str, Capability]


def kinds() -> list[DeviceKind]:
    """Return all registered kinds of devices in the order of ``list_devices``. No device context is created."""
    found = list_devices()
    calls = [functools.partial(_capabilities, info.name) for info in found if info.is_available]
    answers = iter(outcomes_within(Settings.from_env().probe_timeout_s, calls))  # of somebody else's code
    return [_kind(info, next(answers) if info.is_available else None) for info in found]


def describe(name: str) -> Description:
    """Return the description of one device.

    Raises:
        DeviceError: the device is unknown or not available, or its plugin's code fails.
    """
    device = get_device(name)
    (described,) = outcomes_within(Settings.from_env().probe_timeout_s, [functools.partial(_description, device)])
    if described.error is not None:  # of somebody else's code
        raise DeviceError(f"device {name!r} cannot be described: {one_line(described.error)}") from described.error
    return described.get()


def _description(device: Device) -> Description:
    properties, capabilities, simulation = _properties(device), capabilities_of(device), device.simulation()
    return Description(
        name=device.name,
        vendor=device.vendor,
        properties=properties,
        simulation=None if simulation is None else simulation.counted(),
        capabilities=capabilities,
    )


def _properties(device: Device) -> DeviceProperties:
    """Return what the device says of itself; nothing where it cannot be asked, which its capabilities say."""
    try:
        return device.properties()
    except UnsupportedError:
        return DeviceProperties("", "", 0, "", 0)


def capabilities_of(device: Device) -> dict[str, Capability]:
    """Return the checked ``device.capabilities()``; raises PluginError for a wrong answer, and the device's errors."""
    found = device.capabilities()
    if not isinstance(found, dict):
        raise PluginError(f"capabilities() returned {type(found).__name__}, not a dict")
    if wrong := [str(member) for member, how in found.items() if not isinstance(how, Capability)]:
        raise PluginError(f"capabilities() answered with no Capability for {', '.join(wrong)}")
    return found


def summary(capabilities: dict[str, Capability]) -> str:
    """Return the counts in words, such as "22 native, 1 emulated, 3 unsupported"."""
    found = [how.support for how in capabilities.values()]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in ("native", "emulated", "unsupported") if kind in found)


def _capabilities(name: str) -> dict[str, Capability]:
    return capabilities_of(get_device(name))


def _kind(info: DeviceInfo, answer: CallOutcome[dict[str, Capability]] | None) -> DeviceKind:
    facts, error = launch(info.name), answer and answer.error
    return DeviceKind(
        info=info,
        visible_devices_variable=facts.visible_devices_variable,
        visible_devices=facts.visible_devices(),
        ray_resource=facts.ray_resource,
        capabilities=answer.value if answer else None,
        error=_told(error) if error else "",
    )


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, DeviceError) else f"capabilities() failed: {one_line(error)}"
