"""Registers Huawei's Ascend NPUs, and the operators for which the vendor has kernels."""

from __future__ import annotations

from rlcore.hookspecs import RegisterDevice, RegisterOp, hookimpl
from rlcore.types import DeviceSpec, ProgramLimits

_BUFFER_BYTES = 192 << 10
"""Unified buffer of a core, Atlas A2. The compiler keeps each tile twice, to load one while it computes the other."""


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
            vllm_plugin="vllm-ascend",
            program_limits=ProgramLimits(tile_bytes=_BUFFER_BYTES // 2, num_programs=65_535, has_float64=False),
        )
    )


@hookimpl
def rlcore_register_ops(register: RegisterOp) -> None:
    at = "rlcore.devices.ascend.attention"
    register(
        "packed_attention",
        "npu",
        f"{at}:attend_fusion",
        name="npu_fusion_attention",
        priority=10,
        when=f"{at}:fusion_lacks",
    )
    register("rms_norm", "npu", "rlcore.devices.ascend.norm:rms_norm", name="npu_rms_norm", priority=10)
