"""Registers the built-in executors."""

from __future__ import annotations

from rlcore.hookspecs import RegisterExecutor, hookimpl


@hookimpl
def rlcore_register_executors(register: RegisterExecutor) -> None:
    register("train", "fsdp2", "rlcore.engines.executors.fsdp2:Fsdp2Worker")
    register("inference", "hf", "rlcore.engines.executors.hf:HfWorker")
    register("inference", "vllm", "rlcore.engines.executors.vllm.worker:VllmWorker")
