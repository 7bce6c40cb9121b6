"""What rlcore uses of vLLM's classes, which the docstrings name; a test holds it against every version supported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Engine(Protocol):
    """vllm.v1.engine.llm_engine.LLMEngine"""

    vllm_config: Config
    engine_core: Client

    def add_request(self, request_id: str, prompt: Any, params: Any) -> object: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def step(self) -> Sequence[Request]: ...
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...
    def reset_mm_cache(self) -> None: ...
    def reset_encoder_cache(self) -> None: ...
    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]: ...


class Client(Protocol):
    """vllm.v1.engine.core_client.InprocClient"""

    def shutdown(self) -> None: ...


class Worker(Protocol):
    """vllm.v1.worker.gpu_worker.Worker"""

    device: torch.device
    rank: int
    model_runner: Runner
    vllm_config: Config


class Runner(Protocol):
    """vllm.v1.worker.gpu_model_runner.GPUModelRunner
    vllm.v1.worker.gpu.model_runner.GPUModelRunner"""

    kv_caches: list[Tensor | list[Tensor]]
    """Of each layer; those with a state (Mamba) have several."""

    def get_model(self) -> nn.Module: ...


class Config(Protocol):
    """vllm.config.vllm.VllmConfig"""

    model_config: ModelConfig
    compilation_config: Layers


class ModelConfig(Protocol):
    """vllm.config.model.ModelConfig"""

    model: str
    dtype: torch.dtype
    max_model_len: int


class Layers(Protocol):
    """vllm.config.compilation.CompilationConfig"""

    static_forward_context: dict[str, Any]


class Reloading(Protocol):
    """vllm.model_executor.model_loader.reload.types.LayerReloadingInfo"""

    restore_metadata: tuple[dict[str, Tensor], dict[str, Tensor]]
    kernel_tensors: tuple[dict[str, Tensor], dict[str, Tensor]] | None
    loaded_weights: list[tuple[str, Any]]


class Platform(Protocol):
    """vllm.platforms.interface.Platform"""

    def is_cpu(self) -> bool: ...


class Allocator(Protocol):
    """vllm.device_allocator.cumem.CuMemAllocator"""

    pointer_to_data: dict[int, Allocation]
    allocator_and_pools: dict[str, tuple[Any, Any]]
    """torch's memory pool of a tag, and the allocator of the pool."""


class Allocation(Protocol):
    """vllm.device_allocator.AllocationData"""

    handle: tuple[Any, ...]
    """Device index, bytes, address, and what the driver knows it by."""
    tag: str
    is_asleep: bool


class Request(Protocol):
    """vllm.outputs.RequestOutput"""

    request_id: str
    outputs: list[Sampled]


class Sampled(Protocol):
    """vllm.outputs.CompletionOutput"""

    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Likelihood]] | None
    finish_reason: str | None


class Likelihood(Protocol):
    """vllm.logprobs.Logprob"""

    logprob: float


class SyncClient(Protocol):
    """vllm.distributed.weight_transfer.base.VLLMWeightSyncClient"""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self) -> None: ...
