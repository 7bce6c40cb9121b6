"""The interfaces of SGLang's classes, as far as rlcore uses them.

Each docstring names the classes in SGLang. A test holds them against every supported version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from torch import Tensor, nn


class SglangEngine(Protocol):
    """sglang.srt.entrypoints.engine.Engine"""

    tokenizer_manager: SglangTokenizerManager

    def collective_rpc(self, method: str, **kwargs: Any) -> None: ...


class SglangTokenizerManager(Protocol):
    """sglang.srt.managers.tokenizer_manager.TokenizerManager"""

    def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]: ...
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...
    async def get_internal_state(self) -> list[dict[Any, Any]]: ...


class SglangScheduler(Protocol):
    """sglang.srt.managers.scheduler.Scheduler"""

    tp_worker: SglangTpWorker
    model_config: SglangModelConfig
    running_batch: SglangBatch
    last_batch: SglangBatch | None
    chunked_req: SglangRequest | None
    waiting_queue: list[SglangRequest]
    token_to_kv_pool_allocator: SglangKvAllocator
    req_to_token_pool: SglangPlaces
    max_req_len: int
    max_req_input_len: int
    max_total_num_tokens: int
    page_size: int

    def pause_generation(self, recv_req: Any) -> None: ...
    def continue_generation(self, recv_req: Any) -> None: ...
    def flush_cache(self, empty_cache: bool = True) -> bool: ...


class SglangTpWorker(Protocol):
    """sglang.srt.managers.tp_worker.TpModelWorker"""

    model_runner: SglangModelRunner


class SglangModelRunner(Protocol):
    """sglang.srt.model_executor.model_runner.ModelRunner"""

    model: nn.Module
    model_config: SglangModelConfig
    load_config: Any


class SglangModelConfig(Protocol):
    """sglang.srt.configs.model_config.ModelConfig"""

    model_path: str
    dtype: Any
    num_hidden_layers: int
    hf_eos_token_id: set[int] | None


class SglangBatch(Protocol):
    """sglang.srt.managers.schedule_batch.ScheduleBatch"""

    reqs: list[SglangRequest]


class SglangRequest(Protocol):
    """sglang.srt.managers.schedule_batch.Req"""

    rid: str
    output_ids: list[int]

    def finished(self) -> bool: ...


class SglangKvAllocator(Protocol):
    """sglang.srt.mem_cache.allocator.BaseTokenToKVPoolAllocator"""

    def get_kvcache(self) -> Any: ...


class SglangPlaces(Protocol):
    """sglang.srt.mem_cache.memory_pool.ReqToTokenPool"""

    req_to_token: Tensor


class SglangSamplingInfo(Protocol):
    """sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"""

    temperatures: Tensor
    """[B, 1]"""
    top_ps: Tensor
    top_ks: Tensor
    sampling_seed: Tensor
    is_all_greedy: bool
    need_top_p_sampling: bool
    need_top_k_sampling: bool
