"""Registers NVIDIA GPUs."""

from __future__ import annotations

from rlcore.hookspecs import RegisterDevice, hookimpl
from rlcore.types import DeviceSpec


@hookimpl
def rlcore_register_devices(register: RegisterDevice) -> None:
    register(
        DeviceSpec(
            name="cuda",
            vendor="NVIDIA",
            torch_type="cuda",
            priority=100,
            loader="rlcore.devices.cuda.device:CudaDevice",
            collective_backend="nccl",
            api_version=(1, 0),
            visible_devices_variable="CUDA_VISIBLE_DEVICES",
            ray_resource="GPU",
        )
    )
