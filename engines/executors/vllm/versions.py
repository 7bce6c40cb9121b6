"""All that rlcore takes from vLLM, and what differs between its versions. No other file imports it.

The protocols name what is used of vLLM's classes, which their docstrings name; a test holds them against every
version that is supported.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlcore.engines.executors.vllm import ascend
from rlcore.errors import InvalidInputError, MissingDependencyError, UnsupportedError

OLDEST, NEWEST = (0, 26), (0, 33)

# What the user's own environment does not say otherwise. The engine core runs in the worker's own process: its
# scheduling is the same each time, and its steps are rlcore's to make. Nothing is sent to vLLM's makers.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_DISABLE_LOG_LOGO": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}


class Engine(Protocol):
    """vllm.v1.engine.llm_engine.LLMEngine"""

    vllm_config: Any

    def add_request(self, request_id: str, prompt: Any, params: Any) -> object: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def step(self) -> Sequence[Any]: ...
    def has_unfinished_requests(self) -> bool: ...
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...
    def reset_mm_cache(self) -> None: ...
    def reset_encoder_cache(self) -> None: ...
    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]: ...


class Worker(Protocol):
    """vllm.v1.worker.gpu_worker.Worker"""

    device: torch.device
    rank: int
    model_runner: Runner
    vllm_config: Any


class Runner(Protocol):
    """vllm.v1.worker.gpu_model_runner.GPUModelRunner
    vllm.v1.worker.gpu.model_runner.GPUModelRunner"""

    kv_caches: list[Tensor | list[Tensor]]
    """Of each layer; those with a state (Mamba) have several."""

    def get_model(self) -> nn.Module: ...


class Reloading(Protocol):
    """vllm.model_executor.model_loader.reload.types.LayerReloadingInfo"""

    kernel_tensors: tuple[dict[str, Tensor], dict[str, Tensor]] | None
    loaded_weights: list[tuple[str, Any]]


class Platform(Protocol):
    """vllm.platforms.interface.Platform"""

    def is_cpu(self) -> bool: ...


class Allocator(Protocol):
    """vllm.device_allocator.cumem.CuMemAllocator"""

    pointer_to_data: dict[int, Allocation]


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
    logprobs: Sequence[dict[int, Any]] | None
    finish_reason: str | None


def prepare() -> str:
    """Set vLLM's environment and import it; returns its version.

    Raises:
        MissingDependencyError: it is not installed.
        UnsupportedError: a version that rlcore does not know.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about vLLM's code
    try:
        import vllm
    except ImportError as error:
        raise MissingDependencyError("vllm", needed_for="the vllm executor", extra="vllm") from error
    if ascend.is_installed():
        ascend.prepare(vllm.__version__)
    else:
        check_version(vllm.__version__)
    _keep_weights_plain()
    version: str = vllm.__version__
    return version


def check_version(version: str) -> None:
    """Raises UnsupportedError outside the range that rlcore was held against."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise UnsupportedError(
            f"vLLM {version}",
            f"the vllm executor knows {oldest} to {newest}; run: pip install 'vllm>={oldest},<={newest}.99'",
        )


def _keep_weights_plain() -> None:
    """On a host, vLLM packs weights for its matrix library and drops the originals: nothing could be synced into."""
    from vllm.platforms import current_platform

    platform: Platform = current_platform
    if platform.is_cpu():
        import vllm._custom_ops as operators
        import vllm.model_executor.layers.utils as layers

        operators._supports_onednn = False
        layers.check_cpu_sgl_kernel = lambda *_: False


def argument_names() -> list[str]:
    """Of an engine."""
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    return [field.name for field in dataclasses.fields(EngineArgs)]


def new_engine(arguments: dict[str, Any]) -> Engine:
    """Raises InvalidInputError where vLLM refuses the arguments."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        config = EngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InvalidInputError(f"vLLM refuses these arguments of build(): {error}") from error
    if config.model_config.dtype == torch.float32:  # as vLLM has it for matrices; its attention would take TF32
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    engine: Engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    return engine


def sampling_params(*, is_streamed: bool, **fields: Any) -> Any:
    """Of one request of one sample, whose log-probs of sampled tokens are wanted and no text.

    Args:
        is_streamed: each step gives its new tokens; else the last gives all.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    return SamplingParams(n=1, logprobs=0, detokenize=False, output_kind=kind, **fields)


def allocations(tag: str) -> list[Allocation]:
    """Device memory that vLLM's allocator has under a tag; its addresses stay when it is unmapped."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Allocator = CuMemAllocator.get_instance()
    return [allocation for allocation in allocator.pointer_to_data.values() if allocation.tag == tag]


def map_memory(allocation: Allocation) -> None:
    from vllm.device_allocator.cumem import create_and_map

    create_and_map(allocation.handle)
    allocation.is_asleep = False


def unmap_memory(allocation: Allocation) -> None:
    from vllm.device_allocator.cumem import unmap_and_release

    unmap_and_release(allocation.handle)
    allocation.is_asleep = True


def storage_at(address: int, device: torch.device, nbytes: int) -> Any:
    """Memory of somebody else's."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


@contextlib.contextmanager
def reloading(model: nn.Module, vllm_config: Any) -> Iterator[None]:
    """Inside, ``model.load_weights`` may be called, also in parts; what it got is processed at the end.

    Of a layer that got some of its tensors vLLM would leave the others undefined: they are kept.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        get_layerwise_info,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    try:
        yield
    finally:
        kept = [
            (tensor, tensor.clone()) for layer in model.modules() for tensor in _not_loaded(get_layerwise_info(layer))
        ]
        finalize_layerwise_reload(model, vllm_config.model_config)
        for tensor, before in kept:
            tensor.copy_(before)


def _not_loaded(info: Reloading) -> list[Tensor]:
    """Of a layer that got something, but not all, what it did not get."""
    if not info.loaded_weights or info.kernel_tensors is None:
        return []
    loaded = {name for name, _ in info.loaded_weights}
    parameters, buffers = info.kernel_tensors
    return [tensor.detach() for name, tensor in {**parameters, **buffers}.items() if name not in loaded]


def kv_caches(runner: Runner) -> list[Tensor]:
    """All of this worker's."""
    return [one for cache in runner.kv_caches for one in ([cache] if isinstance(cache, Tensor) else cache)]


def after_kv_cache_is_back(runner: Runner) -> None:
    """New memory may hold anything, NaN too. Up to 0.28 the scales of an FP8 cache are lost with it."""
    for cache in kv_caches(runner):
        cache.zero_()
    if hasattr(runner, "post_kv_cache_wake_up"):
        runner.post_kv_cache_wake_up()
