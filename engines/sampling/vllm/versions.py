"""All that rlcore takes from vLLM, and what differs between its versions; only ``meta_model.py`` imports it too."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import uuid
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.device import Device
from rlcore.engines.sampling.vllm import ascend
from rlcore.engines.sampling.vllm.interfaces import (
    Allocation,
    Allocator,
    Config,
    Engine,
    Layers,
    Platform,
    Reloading,
    Runner,
)
from rlcore.errors import InvalidInputError, MissingDependencyError, UnsupportedError
from rlcore.process.guard import FAMILY

OLDEST, NEWEST = (0, 26), (0, 33)
_MOST_SOCKET_BYTES = 107  # unix(7), without the zero at the end

# What the user's own environment does not say otherwise. The engine core runs in the worker's own process: its
# scheduling is the same each time, and its steps are rlcore's to make. Nothing is sent to vLLM's makers.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "FLASHINFER_LOGGING_LEVEL": "ERROR",
    "VLLM_DISABLE_LOG_LOGO": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}


def prepare() -> str:
    """Set vLLM's environment and import it; returns its version.

    Raises:
        MissingDependencyError: it is not installed.
        UnsupportedError: a version that rlcore does not know.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule kv_cache_memory_bytes, which rlcore always gives
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about vLLM's code
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # later ones begin before they set it
    try:
        import vllm
    except ImportError as error:
        raise MissingDependencyError("vllm", needed_for="the vllm executor", extra="vllm") from error
    if ascend.is_installed():
        ascend.prepare(vllm.__version__)
    else:
        check_version(vllm.__version__)
    keep_weights_plain()
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


def check_platform(device: Device) -> None:
    """``device`` is rlcore's. vLLM would take those that it was built for, whatever it is asked for."""
    from vllm.platforms import current_platform

    platform: Platform = current_platform
    if platform.is_cpu() != device.spec.is_host:
        raise UnsupportedError(
            f"vLLM on {device.name}",
            f"what is installed is {'' if platform.is_cpu() else 'not '}vLLM's build for the CPU; build the engine on "
            "a device that it serves, or install the other one",
        )


def keep_weights_plain() -> None:
    """On a host, vLLM packs weights for its matrix library and drops the originals: nothing could be synced into."""
    if packs_weights():
        import vllm._custom_ops as operators
        import vllm.model_executor.layers.utils as layers

        operators._supports_onednn = False
        layers.check_cpu_sgl_kernel = lambda *_: False


def packs_weights() -> bool:
    """This vLLM is the build for the CPU, and ``keep_weights_plain`` was not called."""
    from vllm.platforms import current_platform

    platform: Platform = current_platform
    if not platform.is_cpu():
        return False
    import vllm._custom_ops as operators

    return bool(operators._supports_onednn)


def new_engine(arguments: dict[str, Any], rank: int, local_rank: int, folder: str) -> Engine:
    """Ranks are what an external launcher would say.

    Args:
        folder: where vLLM keeps what its processes find each other by; it is the caller's to remove. "" is its choice.

    Raises:
        InvalidInputError: vLLM refuses the arguments, or cannot start with them, such as for want of memory.
        UnsupportedError: memory of an earlier engine of this process is not free.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        config: Config = EngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InvalidInputError(f"vLLM refuses these arguments of build(): {_said(error)}") from error
    if config.model_config.dtype == torch.float32:  # as vLLM has it for matrices; its attention would take TF32
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    _check_allocator()
    if folder:
        _meet_in(folder)
    quiet = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore::FutureWarning")))  # as in prepare()
    with _environment(RANK=str(rank), LOCAL_RANK=str(local_rank), PYTHONWARNINGS=quiet, **_sockets_in(folder)):
        try:
            engine: Engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except ValueError as error:
            advice = _kv_cache_advice(_said(error), arguments.get("kv_cache_memory_bytes"))
            raise InvalidInputError(
                f"vLLM cannot start with these arguments of build(): {_said(error)}{advice}"
            ) from error
    return engine


def _check_allocator() -> None:
    """vLLM would assert it, once it has begun."""
    allocator = _allocator()
    kept = sum(allocation.handle[1] for allocation in allocator.pointer_to_data.values()) if allocator else 0
    if kept:
        raise UnsupportedError(
            "another vLLM engine in this process",
            f"vLLM's allocator serves one vLLM engine in a process, and still has {kept} bytes of the last one; build "
            "it in a process of its own, without launcher='torchrun'",
        )


def _kv_cache_advice(said: str, kv_bytes: int | None) -> str:
    """vLLM names the share of memory even where the size of its KV cache was given, which then nothing else changes."""
    if kv_bytes is None or "gpu_memory_utilization" not in said:
        return ""
    return f" The KV cache has {kv_bytes} bytes a device: `kv_cache_memory_bytes` is what to raise."


def _sockets_in(folder: str) -> dict[str, str]:
    """What a killed process has in the temporary folder stays there, unless the paths of sockets would be too long."""
    longest = os.path.join(folder, str(uuid.uuid4()))
    return {"VLLM_RPC_BASE_PATH": folder} if folder and len(os.fsencode(longest)) <= _MOST_SOCKET_BYTES else {}


def _meet_in(folder: str) -> None:
    """Later versions make a file, which they leave; earlier ones listen at a port.

    Its name is the beginning of those in /dev/shm of vLLM's build for the CPU, by which a killed worker's are found.
    Each call has a file of its own: nobody can meet in one that others have used.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    def new_file(*_: Any, **__: Any) -> str:
        return f"file://{folder}/vllm_dist_{os.environ[FAMILY]}-{uuid.uuid4().hex[:8]}"

    for executor in (multiproc_executor, uniproc_executor):
        if hasattr(executor, "get_file_store_init_method"):
            executor.get_file_store_init_method = new_file


def _said(error: Exception) -> str:
    """Of pydantic's report of several lines what is wrong with which argument."""
    each = getattr(error, "errors", None)
    if each is None:
        return str(error)
    return "; ".join(": ".join([*map(str, one["loc"][:1]), one["msg"]]) for one in each())


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def leaving(engine: Engine, device: Device) -> Iterator[None]:
    """End an engine in a process that goes on, and may make another; inside, whoever has it lets go of it.

    vLLM would destroy every torch.distributed group of the process, the trainer's too.

    Args:
        device: of rlcore; gets its memory back.
    """
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = _destroy_own_groups
    allocator = _allocator()
    # Those of torch's pools: vLLM drops them before the tensors that they are to free.
    kept = [pool[1] for pool in allocator.allocator_and_pools.values()] if allocator else []
    engine.engine_core.shutdown()
    del engine
    yield
    gc.collect()
    device.memory.empty_cache()
    del kept


def _destroy_own_groups() -> None:
    import vllm.distributed.parallel_state as ranks

    ranks.destroy_model_parallel()
    if ranks._WORLD is not None:
        ranks._WORLD.destroy()
        ranks._WORLD = None


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
    allocator = _allocator()
    return [one for one in allocator.pointer_to_data.values() if one.tag == tag] if allocator else []


def _allocator() -> Allocator | None:
    """Of this process; None until an engine has used it, and on a host."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Allocator | None = CuMemAllocator.instance
    return allocator


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


def weight_transfer_base() -> Any:
    """What a back end of vLLM's own weight transfer derives from; in 0.26 the trainer's side is a part of it.

    Raises:
        UnsupportedError: a version that rlcore does not know.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
    except ImportError:  # who has no vLLM may read the module
        return object
    check_version(vllm.__version__)
    return WeightTransferEngine


def weight_transfer_trainer_bases() -> tuple[Any, Any]:
    """What the trainer's side of vLLM's own weight transfer and its information derive from.

    Raises:
        UnsupportedError: a version that rlcore does not know.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    except ImportError:  # as for weight_transfer_base
        return object, object
    check_version(vllm.__version__)
    return TrainerWeightTransferEngine, TrainerInitInfo


def register_weight_transfer_trainer(name: str, module: str, class_name: str) -> None:
    """As ``register_weight_transfer``."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(name, module, class_name)


def register_weight_transfer(name: str, module: str, class_name: str) -> None:
    """Nothing if it is known already, or if this vLLM has no weight transfer: it calls this in every process."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(name, module, class_name)


def forget_reloads(model: nn.Module) -> None:
    """What vLLM knows of a layer to reload it ends with the layer, and refers to it: neither ever would."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info: Reloading = get_layerwise_info(layer)
        info.restore_metadata = ({}, {})


@contextlib.contextmanager
def reloading(model: nn.Module, vllm_config: Config) -> Iterator[None]:
    """Inside, ``model.load_weights`` may be called, also in parts; what it got is processed at the end.

    Of a layer that got some of its elements vLLM would leave the others undefined: they are kept.
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
        kept = [found for layer in model.modules() for found in _kept(layer, get_layerwise_info(layer))]
        finalize_layerwise_reload(model, vllm_config.model_config)
        for tensor, before in kept:
            tensor.copy_(before)


def _kept(layer: nn.Module, info: Reloading) -> Iterator[tuple[Tensor, Tensor]]:
    """Of a layer that got something, but not all, what it did not get, and its values.

    What it got in part is to be loaded over the values that it has.
    """
    if not info.loaded_weights or info.kernel_tensors is None:
        return
    loaded = {name for name, _ in info.loaded_weights}
    parameters, buffers = info.kernel_tensors
    for name, tensor in {**parameters, **buffers}.items():
        if name not in loaded:
            yield tensor.detach(), tensor.detach().clone()
        elif (empty := getattr(layer, name)).is_meta and _is_alike(empty, tensor):
            setattr(layer, name, _with_values(empty, tensor))


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Of one layout: what is loaded is what the kernels use."""
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def _with_values(empty: Tensor, values: Tensor) -> Tensor:
    """As vLLM makes a parameter of one on meta, whose class and attributes its loader reads."""
    made = values.data.clone()
    made.__class__ = empty.__class__
    made.__dict__ = empty.__dict__.copy()
    return made


def kv_caches(runner: Runner) -> list[Tensor]:
    """All of this worker's."""
    return _flat(runner.kv_caches)


def layer_caches(model: Layers) -> list[Tensor]:
    """The KV caches as the layers know them; none before they are allocated."""
    return _flat(getattr(layer, "kv_cache", ()) for layer in model.static_forward_context.values())


def _flat(caches: Iterable[Tensor | Iterable[Tensor]]) -> list[Tensor]:
    return [one for cache in caches for one in ([cache] if isinstance(cache, Tensor) else cache)]


def after_kv_cache_is_back(runner: Runner) -> None:
    """New memory may hold anything, NaN too. Up to 0.28 the scales of an FP8 cache are lost with it."""
    for cache in kv_caches(runner):
        cache.zero_()
    if hasattr(runner, "post_kv_cache_wake_up"):
        runner.post_kv_cache_wake_up()
