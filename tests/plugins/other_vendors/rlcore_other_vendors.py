"""Devices that torch knows, registered as they are: all behaviour is ``GenericTorchDevice``.

The facts are from torch (device types, back ends) and the vendors' documentation (variables). Nothing here was run on
such hardware.
"""

from rlcore import DeviceSpec, hookimpl

GENERIC = "rlcore.devices.generic:GenericTorchDevice"


@hookimpl
def rlcore_register_devices(register):
    register(
        DeviceSpec(
            name="rocm",
            vendor="AMD",
            torch_type="cuda",  # ROCm builds of torch call it so
            torch_build="hip",
            priority=90,
            loader=GENERIC,
            collective_backend="nccl",  # which is RCCL there
            api_version=(1, 0),
            visible_devices_variable="HIP_VISIBLE_DEVICES",
            ray_resource="GPU",
        )
    )
    register(
        DeviceSpec(
            name="xpu",
            vendor="Intel",
            torch_type="xpu",
            priority=80,
            loader=GENERIC,
            collective_backend="xccl",
            api_version=(1, 0),
            visible_devices_variable="ZE_AFFINITY_MASK",
            ray_resource="GPU",
        )
    )
    register(
        DeviceSpec(
            name="musa",
            vendor="Moore Threads",
            torch_type="musa",
            priority=70,
            loader=GENERIC,
            collective_backend="mccl",
            api_version=(1, 0),
            visible_devices_variable="MUSA_VISIBLE_DEVICES",
        )
    )
    register(
        DeviceSpec(
            name="mps",
            vendor="Apple",
            torch_type="mps",
            priority=60,
            loader=GENERIC,
            collective_backend="gloo",
            api_version=(1, 0),
        )
    )
