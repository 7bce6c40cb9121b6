"""Registers the CPU device."""

from __future__ import annotations

from rlcore.hookspecs import RegisterDevice, hookimpl
from rlcore.types import DeviceSpec


@hookimpl
def rlcore_register_devices(register: RegisterDevice) -> None:
    register(
        DeviceSpec(
            name="cpu",
            vendor="host",
            torch_type="cpu",
            priority=0,
            loader="rlcore.devices.cpu.device:CpuDevice",
            collective_backend="gloo",
            api_version=(1, 0),
            ray_resource="CPU",
            is_host=True,
        )
    )
