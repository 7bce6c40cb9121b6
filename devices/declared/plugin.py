"""Registers the devices that torch carries and nobody has run rlcore on.

They are listed with the others. A plugin that registers a device of the same name takes its place.
"""

from __future__ import annotations

from rlcore.hookspecs import RegisterDevice, hookimpl
from rlcore.types import DeviceSpec

_DEVICE = "rlcore.devices.declared.device:DeclaredDevice"

# The types and libraries are torch's, the variables the vendors'. Priorities are below those of any vendor's plugin.
SPECS = (
    DeviceSpec(
        name="rocm",
        vendor="AMD",
        torch_type="cuda",  # ROCm builds of torch call it so
        torch_build="hip",
        priority=4,
        loader="rlcore.devices.declared.device:RocmDevice",
        collective_backend="nccl",  # which is RCCL there
        api_version=(1, 0),
        visible_devices_variable="HIP_VISIBLE_DEVICES",
        ray_resource="GPU",
        warp_lanes=(32, 64),
    ),
    DeviceSpec(
        name="xpu",
        vendor="Intel",
        torch_type="xpu",
        priority=3,
        loader=_DEVICE,
        collective_backend="xccl",
        api_version=(1, 0),
        visible_devices_variable="ZE_AFFINITY_MASK",
        ray_resource="GPU",
    ),
    DeviceSpec(
        name="musa",
        vendor="Moore Threads",
        torch_type="musa",
        priority=2,
        loader=_DEVICE,
        collective_backend="mccl",
        api_version=(1, 0),
        visible_devices_variable="MUSA_VISIBLE_DEVICES",
    ),
    DeviceSpec(
        name="mps",
        vendor="Apple",
        torch_type="mps",
        priority=1,
        loader=_DEVICE,
        collective_backend="gloo",
        api_version=(1, 0),
    ),
)


@hookimpl
def rlcore_register_devices(register: RegisterDevice) -> None:
    for spec in SPECS:
        register(spec)
