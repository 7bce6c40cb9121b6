"""The arguments of a vLLM engine: the user's, checked by name, and those that rlcore sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlcore.device import Device
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.model_folder import ModelFolder
from rlcore.engines.sampling.replica.arguments import fields_of, package_folder, refuse_own, refuse_unknown
from rlcore.errors import DeviceError, InvalidInputError

EXTENSION = "rlcore.engines.sampling.vllm.extension.RlcoreWorkerExtension"

_OWN = {
    "model": "it is the engine's path",
    "tokenizer": "it is the model folder's",
    "skip_tokenizer_init": "rlcore reads and writes text itself",
    "tensor_parallel_size": "name it in build(), outside the engine arguments",
    "data_parallel_size": "name it in build(), outside the engine arguments",
    "pipeline_parallel_size": "a replica is tensor-parallel only",
    "distributed_executor_backend": "the workers are rlcore's",
    "worker_cls": "the workers are rlcore's",
    "worker_extension_cls": "weights are synced through rlcore's own",
    "enable_sleep_mode": "offload() and onload() need it as rlcore sets it",
    "enable_cumem_allocator": "offload() and onload() need it as rlcore sets it",
    "logprobs_mode": "log-probs are of the distribution that was sampled from",
    "use_tqdm_on_load": "the log stays quiet",
}
"""Arguments that the user cannot choose, and why."""
_ON_A_HOST = {"enable_chunked_prefill": False}
"""Arguments that a host needs, unless the user names others. vLLM fails there at a prompt with a seed that it computes
in parts, because it winds back the generator of random numbers, which a host's cannot."""
BATCH_INVARIANT = "batch_invariant"
"""An argument that is an environment variable of vLLM's."""
_KV_SHARE = 0.7
"""Fraction of the device memory that the weights leave free; the rest is for activations and captured graphs."""
_MOST_HOST_KV_BYTES = 4 << 30
_WEIGHT_BYTES = {"float32": 4, "float": 4}


def engine_arguments(given: Mapping[str, Any], folder: ModelFolder, context: WorkerContext) -> dict[str, Any]:
    """Return all arguments of the engine that drives the context's devices; ``given`` are the user's.

    Raises:
        InvalidInputError, MissingDependencyError: as ``check_arguments``.
        DeviceError: no memory is left for a KV cache.
    """
    check_arguments(given)
    device, is_rank = context.device, not context.devices  # a rank of torchrun drives no devices
    if device.spec.is_host and "max_num_batched_tokens" not in given:
        given = _ON_A_HOST | dict(given)
    size = context.world_size if is_rank else len(context.devices)
    replica = _rank_of_torchrun() // size if is_rank else context.rank
    arguments = {
        "model": os.fspath(folder.path),
        "skip_tokenizer_init": not folder.reads_images,  # vLLM's processors of images ask for a tokenizer
        "tensor_parallel_size": size,
        "distributed_executor_backend": "external_launcher" if is_rank else "uni" if size == 1 else "mp",
        "worker_extension_cls": EXTENSION,
        "enable_sleep_mode": not device.spec.is_host,
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        **given,
        # vLLM refuses to start when less than this fraction is free; kv_cache_memory_bytes limits what it uses.
        "gpu_memory_utilization": 0.01,
        "seed": given.get("seed", 0) + replica,  # else all replicas would draw the same samples
    }
    if arguments.get("kv_cache_memory_bytes") is None:
        weight_bytes = _weight_bytes(folder, str(given.get("dtype", "auto"))) // size
        arguments["kv_cache_memory_bytes"] = _kv_cache_bytes(device, weight_bytes, given.get("gpu_memory_utilization"))
    return arguments


def check_arguments(given: Mapping[str, Any], python: str | os.PathLike[str] | None = None) -> None:
    """Check the names of arguments without importing vLLM: that takes seconds, and may leave a context on a device.

    Args:
        python: the interpreter that has vLLM; None is this one.

    Raises:
        InvalidInputError: a name that only rlcore sets, or that this vLLM does not know; says the nearest one.
        MissingDependencyError: this interpreter has no vLLM.
    """
    refuse_own(given, _OWN, "vllm")
    if not isinstance(given.get(BATCH_INVARIANT, False), bool):
        raise InvalidInputError(f"{BATCH_INVARIANT} must be True or False, got {given[BATCH_INVARIANT]!r}")
    given = {name: value for name, value in given.items() if name != BATCH_INVARIANT}
    package = package_folder("vllm", python, "vllm")
    refuse_unknown(given, fields_of(package / "engine" / "arg_utils.py", "EngineArgs") if package else [], "vLLM")


def _rank_of_torchrun() -> int:
    # Not in engine_arguments, whose keys the tests take for arguments of vLLM.
    return int(os.environ["RANK"])


def _weight_bytes(folder: ModelFolder, dtype: str) -> int:
    """Return the bytes of the whole model in the dtype that it will have."""
    weight_bytes = sum(file.stat().st_size for file in folder.weight_files)
    stored = str(folder.config.get("dtype", folder.config.get("torch_dtype", "bfloat16")))
    if dtype == "auto":
        return weight_bytes
    return weight_bytes * _WEIGHT_BYTES.get(dtype, 2) // _WEIGHT_BYTES.get(stored, 2)


def _kv_cache_bytes(device: Device, weight_bytes: int, utilization: float | None) -> int:
    """Return the size of the KV cache of one device.

    vLLM would measure it, which fails when another program takes or frees memory meanwhile.

    Args:
        utilization: vLLM's ``gpu_memory_utilization``: the fraction of the device for weights, KV cache and all else.
    """
    memory = device.memory.info()
    free_bytes = memory.free_bytes if utilization is None else int(memory.total_bytes * utilization)
    if weight_bytes >= free_bytes:
        raise DeviceError(
            f"{device.name} has {free_bytes} bytes free, and the weights need {weight_bytes}; offload another engine "
            "first"
        )
    found = int((free_bytes - weight_bytes) * _KV_SHARE)
    return min(found, _MOST_HOST_KV_BYTES) if device.spec.is_host else found
