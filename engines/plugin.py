"""Registers the built-in executors and launchers."""

from __future__ import annotations

from rlcore.hookspecs import RegisterExecutor, RegisterLauncher, hookimpl


@hookimpl
def rlcore_register_executors(register: RegisterExecutor) -> None:
    register("train", "fsdp2", "rlcore.engines.fsdp2.executor:Fsdp2Executor")
    register("train", "deepspeed", "rlcore.engines.deepspeed.executor:DeepSpeedExecutor")
    register("inference", "hf", "rlcore.engines.sampling.hf.executor:HfExecutor")
    register("inference", "sglang", "rlcore.engines.sampling.sglang.executor:SglangExecutor")
    register("inference", "vllm", "rlcore.engines.sampling.vllm.executor:VllmExecutor")


@hookimpl
def rlcore_register_launchers(register: RegisterLauncher) -> None:
    register("inline", "rlcore.engines.launchers.inline:InlineLauncher")
    register("process", "rlcore.engines.launchers.process:ProcessLauncher")
    register("ray", "rlcore.engines.launchers.ray.launcher:RayLauncher")
    register("torchrun", "rlcore.engines.launchers.torchrun:TorchrunLauncher")
