"""What rlcore finds through the entry point: data only, no torch."""

from __future__ import annotations

from rlcore import DeviceSpec, hookimpl


@hookimpl
def rlcore_register_devices(register):
    register(
        DeviceSpec(
            name="simdev",
            vendor="rlcore tests",
            torch_type="simdev",
            priority=50,
            loader="rlcore_simdev.device:SimDevice",
            collective_backend="simccl",
            api_version=(1, 0),
            visible_devices_variable="SIMDEV_VISIBLE_DEVICES",
            ray_resource="simdev",
        )
    )
