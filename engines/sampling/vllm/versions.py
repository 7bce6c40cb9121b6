"""All uses of vLLM's code, and the differences between its versions. Only ``meta_model.py`` imports vLLM too."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlcore import _torch_private
from rlcore.device import Device
from rlcore.engines.sampling.prompts import MultimodalPrompt
from rlcore.engines.sampling.replica import version_bounds
from rlcore.engines.sampling.vllm import ascend
from rlcore.engines.sampling.vllm.interfaces import (
    VllmAllocation,
    VllmAllocator,
    VllmCompilationConfig,
    VllmConfig,
    VllmEngine,
    VllmLayerReloading,
    VllmModelRunner,
    VllmPlatform,
)
from rlcore.errors import InvalidInputError, MissingDependencyError, UnsupportedError
from rlcore.process.guard import FAMILY
from rlcore.process.socket_address import MOST_BYTES

OLDEST, NEWEST = (0, 26), (0, 33)

# Defaults that the user's own environment overrides. Nothing is sent to vLLM's makers.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "FLASHINFER_LOGGING_LEVEL": "ERROR",
    "VLLM_DISABLE_LOG_LOGO": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}
_PLAIN_SCALES = {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
"""On Hopper vLLM would round the scales of float8 weights to powers of two, and quantise a second time from the first
result. No kernel needs that there, and a weight sync quantises once."""
_HOPPER = range(90, 100)


def prepare(*, is_batch_invariant: bool = False, arch: int = 0) -> str:
    """Set vLLM's environment and import it; return its version.

    Args:
        arch: of the device, as ``PlannedDevice`` has it.

    Raises:
        MissingDependencyError: vLLM is not installed.
        UnsupportedError: a version that is older than rlcore knows.
    """
    for name, value in (_ENVIRONMENT | (_PLAIN_SCALES if arch in _HOPPER else {})).items():
        os.environ.setdefault(name, value)
    # The engine core runs in this process: it schedules the same each time, and rlcore decides when it makes a step.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule kv_cache_memory_bytes, which rlcore always gives
    if is_batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about vLLM's code
    logging.getLogger("vllm").setLevel(
        os.environ["VLLM_LOGGING_LEVEL"].upper()
    )  # later versions log before they set it
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


def routed_experts(sampled: Any) -> Tensor | None:
    """Return the experts of a completion's tokens, [tokens, layers, experts a token] int16, if vLLM recorded them."""
    found = getattr(sampled, "routed_experts", None)  # a NumPy array, which older versions do not have
    return None if found is None else torch.tensor(found.astype("int16"))


def check_version(version: str) -> None:
    """Check the version of vLLM as ``version_bounds.check_version`` does, with the bounds above."""
    version_bounds.check_version("vLLM", version, OLDEST, NEWEST)


def check_platform(device: Device) -> None:
    """Refuse an rlcore device of another kind than this vLLM was built for, which it would use instead."""
    from vllm.platforms import current_platform

    platform: VllmPlatform = current_platform
    if platform.is_cpu() != device.spec.is_host:
        raise UnsupportedError(
            f"vLLM on {device.name}",
            f"what is installed is {'' if platform.is_cpu() else 'not '}vLLM's build for the CPU; build the engine on "
            "a device that it serves, or install the other one",
        )


def keep_weights_plain() -> None:
    """Keep vLLM's build for the CPU from packing weights for its matrix library: none could be synced into them."""
    if packs_weights():
        import vllm._custom_ops as operators
        import vllm.model_executor.layers.utils as layers

        operators._supports_onednn = False
        layers.check_cpu_sgl_kernel = lambda *_: False


def packs_weights() -> bool:
    """Return True if this vLLM is the build for the CPU, and ``keep_weights_plain`` was not called."""
    from vllm.platforms import current_platform

    platform: VllmPlatform = current_platform
    if not platform.is_cpu():
        return False
    import vllm._custom_ops as operators

    return bool(operators._supports_onednn)


def new_engine(arguments: dict[str, Any], rank: int, local_rank: int, folder: str) -> VllmEngine:
    """Make a vLLM engine.

    Args:
        rank, local_rank: as an external launcher would set them.
        folder: folder for the rendezvous files of vLLM's processes, which the caller removes; "" lets vLLM choose.

    Raises:
        InvalidInputError: vLLM refuses the arguments, or cannot start with them, such as for lack of memory.
        UnsupportedError: memory of an earlier engine of this process is not free.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        config: VllmConfig = EngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InvalidInputError(f"vLLM refuses these arguments of build(): {_said(error)}") from error
    if config.model_config.dtype == torch.float32:  # vLLM's matrix products are exact too; its attention would use TF32
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    _check_allocator()
    if folder:
        _set_rendezvous_folder(folder)
    quiet = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore::FutureWarning")))  # as in prepare()
    with _environment(RANK=str(rank), LOCAL_RANK=str(local_rank), PYTHONWARNINGS=quiet, **_sockets_in(folder)):
        try:
            engine: VllmEngine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except ValueError as error:
            advice = _kv_cache_advice(_said(error), arguments.get("kv_cache_memory_bytes"))
            raise InvalidInputError(
                f"vLLM cannot start with these arguments of build(): {_said(error)}{advice}"
            ) from error
    return engine


def _check_allocator() -> None:
    """Refuse a second engine while memory of the first is allocated: vLLM would fail an assertion later."""
    allocator = _allocator()
    kept = sum(allocation.handle[1] for allocation in allocator.pointer_to_data.values()) if allocator else 0
    if kept:
        raise UnsupportedError(
            "another vLLM engine in this process",
            f"vLLM's allocator serves one vLLM engine in a process, and still has {kept} bytes of the last one; build "
            "it in a process of its own, without launcher='torchrun'",
        )


def _kv_cache_advice(said: str, kv_bytes: int | None) -> str:
    """Return advice where vLLM names ``gpu_memory_utilization`` though the size of the KV cache was given."""
    if kv_bytes is None or "gpu_memory_utilization" not in said:
        return ""
    return f" The KV cache has {kv_bytes} bytes a device: `kv_cache_memory_bytes` is what to raise."


def _sockets_in(folder: str) -> dict[str, str]:
    """Return the variable that puts vLLM's sockets into ``folder``, which is removed, unless paths would be too long.

    Without it, a killed process would leave its sockets in the temporary folder.
    """
    longest = os.path.join(folder, str(uuid.uuid4()))
    return {"VLLM_RPC_BASE_PATH": folder} if folder and len(os.fsencode(longest)) <= MOST_BYTES else {}


def _set_rendezvous_folder(folder: str) -> None:
    """Let vLLM make its rendezvous file in ``folder``. Later versions leave the file; earlier ones listen at a port.

    vLLM's build for the CPU begins its names in /dev/shm with the file's name: so those of a killed worker are found.
    Each call makes a file of its own: a used one cannot serve a second rendezvous.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    def new_file(*_: Any, **__: Any) -> str:
        return f"file://{folder}/vllm_dist_{os.environ[FAMILY]}-{uuid.uuid4().hex[:8]}"

    for executor in (multiproc_executor, uniproc_executor):
        if hasattr(executor, "get_file_store_init_method"):
            executor.get_file_store_init_method = new_file


def _said(error: Exception) -> str:
    """Return an error's text; of pydantic's report of several lines, each argument and what is wrong with it."""
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
def leaving(engine: VllmEngine, device: Device) -> Iterator[None]:
    """End an engine in a process that goes on and may make another; inside, the caller drops its references.

    By itself vLLM would destroy every torch.distributed group of the process, including the trainer's.

    Args:
        device: the rlcore device, whose memory is freed.
    """
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = _destroy_own_groups
    allocator = _allocator()
    # The allocators of torch's pools: vLLM drops them before the tensors that they have to free.
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
    """Return vLLM's parameters for a request of one sample, with the log-probs of its tokens and without its text.

    Args:
        is_streamed: True gives new tokens with each step; False gives all with the last.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    return SamplingParams(n=1, logprobs=0, detokenize=False, output_kind=kind, **fields)


def image_prompt(engine: VllmEngine, prompt: MultimodalPrompt, spans: Sequence[range]) -> Any:
    """Return a prompt with images that are processed already, as vLLM's own processor would return it.

    Args:
        spans: the tokens of each image.

    Raises:
        UnsupportedError: vLLM needs more of this model's images than rlcore has.
    """
    from transformers import BatchFeature

    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    inputs = BatchFeature(prompt.inputs)
    fields = engine.renderer.get_mm_processor()._get_mm_fields_config(inputs, {})
    items = MultiModalKwargsItems.from_hf_inputs(inputs, fields)
    found = len(items.get("image", ()))
    if found != len(spans):
        lacking = sorted(fields.keys() - inputs.keys())
        raise UnsupportedError(
            f"this model's images in vLLM, which finds {found} images where there are {len(spans)}",
            f"its processor also makes {', '.join(lacking) or 'other rows'}, which rlcore has not; sample by "
            "executor='hf'",
        )
    return mm_input(
        prompt_token_ids=list(prompt),
        mm_kwargs=items,
        mm_hashes={"image": [f"{prompt.digest.hex()}-{number}" for number in range(len(spans))]},
        mm_placeholders={"image": [PlaceholderRange(offset=span.start, length=len(span)) for span in spans]},
    )


def lora_request(name: str, number: int, path: str) -> Any:
    """Return vLLM's request for the adapters in a folder.

    Args:
        number: at least 1, another one for each name.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def allocations(tag: str) -> list[VllmAllocation]:
    """Return the device memory that vLLM's allocator has under a tag; addresses stay when it is unmapped."""
    allocator = _allocator()
    return [one for one in allocator.pointer_to_data.values() if one.tag == tag] if allocator else []


def _allocator() -> VllmAllocator | None:
    """Return the allocator of this process; None until an engine has used it, and on a host."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: VllmAllocator | None = CuMemAllocator.instance
    return allocator


def set_mapped(allocation: VllmAllocation, is_mapped: bool) -> None:
    """Map memory at the address it had, or give it to the driver."""
    from vllm.device_allocator.cumem import create_and_map, unmap_and_release

    (create_and_map if is_mapped else unmap_and_release)(allocation.handle)
    allocation.is_asleep = not is_mapped


storage_at = _torch_private.storage_at
"""The storage in mapped memory; the module ``ascend`` has one of its own."""


def weight_transfer_base() -> Any:
    """Return the base class of back ends of vLLM's own weight transfer; in 0.26 it has the trainer's side too.

    Raises:
        UnsupportedError: a version that is older than rlcore knows.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
    except ImportError:  # the module can be imported without vLLM
        return object
    check_version(vllm.__version__)
    return WeightTransferEngine


def weight_transfer_trainer_bases() -> tuple[Any, Any]:
    """Return the base classes of the trainer's side of vLLM's own weight transfer, and of its information.

    Raises:
        UnsupportedError: a version that is older than rlcore knows.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    except ImportError:  # as for weight_transfer_base
        return object, object
    check_version(vllm.__version__)
    return TrainerWeightTransferEngine, TrainerInitInfo


def register_weight_transfer_trainer(name: str, module: str, class_name: str) -> None:
    """Register the trainer's side; see ``register_weight_transfer``."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(name, module, class_name)


def register_weight_transfer(name: str, module: str, class_name: str) -> None:
    """Register a back end, unless it is known already or this vLLM has no weight transfer.

    vLLM calls this in every process.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(name, module, class_name)


def forget_reloads(model: nn.Module) -> None:
    """Drop vLLM's records of layers for reloads: each lives as long as its layer and refers to it, so neither ends."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info: VllmLayerReloading = get_layerwise_info(layer)
        info.restore_metadata = ({}, {})


@contextlib.contextmanager
def reloading(model: nn.Module, vllm_config: VllmConfig) -> Iterator[None]:
    """Inside, ``model.load_weights`` may be called, also with parts of the weights; at the end they are processed.

    If a layer gets only some of its elements, vLLM would leave the others undefined: here they are kept.

    A kernel of experts goes on reading the layer's own scales and biases. vLLM gives the layer its tensors back, and
    leaves the kernel with those that were made on the way, which no weight sync writes.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        get_layerwise_info,
        initialize_layerwise_reload,
    )

    layers: list[Any] = list(model.modules())
    read = [(layer, found) for layer in layers for found in _read_by_kernel(layer)]
    initialize_layerwise_reload(model)
    try:
        yield
    finally:
        kept = [found for layer in model.modules() for found in _kept(layer, get_layerwise_info(layer))]
        finalize_layerwise_reload(model, vllm_config.model_config)
        for tensor, before in kept:
            tensor.copy_(before)
        for layer, (matrix, field, name) in read:
            setattr(getattr(layer.quant_method.moe_quant_config, matrix), field, getattr(layer, name))


def _read_by_kernel(layer: Any) -> list[tuple[str, str, str]]:
    """Return which of its own tensors a layer's kernel of experts reads: the matrix, its field, the tensor's name."""
    config = getattr(getattr(layer, "quant_method", None), "moe_quant_config", None)
    names = {id(tensor): name for name, tensor in layer.named_parameters(recurse=False)}
    return [
        (matrix, field, names[id(value)])
        for matrix in ("_w1", "_w2")
        for field, value in vars(getattr(config, matrix, None) or SimpleNamespace()).items()
        if id(value) in names
    ]


def _kept(layer: nn.Module, info: VllmLayerReloading) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors that a partly loaded layer did not get, with their values.

    A tensor that it got in part is made to have its old values first.
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
    """Return True if two tensors have one layout: the kernels then use the loaded tensor as it is."""
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def _with_values(empty: Tensor, values: Tensor) -> Tensor:
    """Return a parameter with these values, and the class and attributes of the meta one, which loaders read."""
    made = values.data.clone()
    made.__class__ = empty.__class__
    made.__dict__ = empty.__dict__.copy()
    return made


def kv_caches(runner: VllmModelRunner) -> list[Tensor]:
    """Return all KV caches of this worker."""
    return _flat(runner.kv_caches)


def layer_caches(model: VllmCompilationConfig) -> list[Tensor]:
    """Return the KV caches that the layers have; none before they are allocated."""
    return _flat(getattr(layer, "kv_cache", ()) for layer in model.static_forward_context.values())


def _flat(caches: Iterable[Tensor | Iterable[Tensor]]) -> list[Tensor]:
    return [one for cache in caches for one in ([cache] if isinstance(cache, Tensor) else cache)]


def reset_kv_cache(runner: VllmModelRunner) -> None:
    """Fill new memory of the KV caches with zeros, as it may hold NaN; up to 0.28, restore the scales of FP8 caches."""
    for cache in kv_caches(runner):
        cache.zero_()
    if hasattr(runner, "post_kv_cache_wake_up"):
        runner.post_kv_cache_wake_up()
