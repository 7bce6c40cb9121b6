"""Registers Huawei's Ascend NPUs, and the operators that their vendor's kernels compute."""

from __future__ import annotations

from rlcore.hookspecs import RegisterDevice, hookimpl
from rlcore.types import DeviceSpec


@hookimpl
def rlcore_register_devices(register: RegisterDevice) -> None:
    register(
        DeviceSpec(
            name="npu",
            vendor="Huawei",
            torch_type="npu",
            priority=100,
            loader="rlcore.devices.ascend.device:AscendDevice",
            collective_backend="hccl",
            api_version=(1, 0),
            visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
            visible_devices_rise=True,
            ray_resource="NPU",
        )
    )
