"""The interfaces of vLLM's classes, as far as rlcore uses them.

Each docstring names the classes in vLLM. A test holds them against every supported version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class VllmEngine(Protocol):
    """vllm.v1.engine.llm_engine.LLMEngine"""

    vllm_config: VllmConfig
    engine_core: VllmCoreClient
    renderer: VllmRenderer

    def add_request(self, request_id: str, prompt: Any, params: Any) -> object: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def step(self) -> Sequence[VllmRequestOutput]: ...
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...
    def reset_mm_cache(self) -> None: ...
    def reset_encoder_cache(self) -> None: ...
    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]: ...


class VllmRenderer(Protocol):
    """vllm.renderers.base.BaseRenderer"""

    def get_mm_processor(self) -> VllmImageProcessor: ...


class VllmImageProcessor(Protocol):
    """vllm.multimodal.processing.processor.BaseMultiModalProcessor"""

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: dict[str, Any]) -> Any: ...


class VllmCoreClient(Protocol):
    """vllm.v1.engine.core_client.InprocClient"""

    def shutdown(self) -> None: ...


class VllmWorker(Protocol):
    """vllm.v1.worker.gpu_worker.Worker"""

    device: torch.device
    rank: int
    model_runner: VllmModelRunner
    vllm_config: VllmConfig


class VllmModelRunner(Protocol):
    """vllm.v1.worker.gpu_model_runner.GPUModelRunner
    vllm.v1.worker.gpu.model_runner.GPUModelRunner"""

    kv_caches: list[Tensor | list[Tensor]]
    """One entry a layer; layers with a state (Mamba) have several tensors."""

    def get_model(self) -> nn.Module: ...


class VllmConfig(Protocol):
    """vllm.config.vllm.VllmConfig"""

    model_config: VllmModelConfig
    compilation_config: VllmCompilationConfig


class VllmModelConfig(Protocol):
    """vllm.config.model.ModelConfig"""

    model: str
    dtype: torch.dtype
    max_model_len: int


class VllmCompilationConfig(Protocol):
    """vllm.config.compilation.CompilationConfig"""

    static_forward_context: dict[str, Any]


class VllmLayerReloading(Protocol):
    """vllm.model_executor.model_loader.reload.types.LayerReloadingInfo"""

    restore_metadata: tuple[dict[str, Tensor], dict[str, Tensor]]
    kernel_tensors: tuple[dict[str, Tensor], dict[str, Tensor]] | None
    loaded_weights: list[tuple[str, Any]]


class VllmPlatform(Protocol):
    """vllm.platforms.interface.Platform"""

    def is_cpu(self) -> bool: ...


class VllmAllocator(Protocol):
    """vllm.device_allocator.cumem.CuMemAllocator"""

    pointer_to_data: dict[int, VllmAllocation]
    allocator_and_pools: dict[str, tuple[Any, Any]]
    """Tag -> torch's memory pool, and the allocator of that pool."""


class VllmAllocation(Protocol):
    """vllm.device_allocator.AllocationData"""

    handle: tuple[Any, ...]
    """Device index, bytes, address, and the driver's handle."""
    tag: str
    is_asleep: bool


class VllmRequestOutput(Protocol):
    """vllm.outputs.RequestOutput"""

    request_id: str
    outputs: list[VllmCompletionOutput]


class VllmCompletionOutput(Protocol):
    """vllm.outputs.CompletionOutput"""

    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, VllmLogprob]] | None
    finish_reason: str | None


class VllmLogprob(Protocol):
    """vllm.logprobs.Logprob"""

    logprob: float


class VllmSyncClient(Protocol):
    """vllm.distributed.weight_transfer.base.VLLMWeightSyncClient"""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
