"""The arguments of an SGLang engine: the user's, checked by name, and those that rlcore sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.model_folder import ModelFolder
from rlcore.engines.sampling.replica.arguments import fields_of, package_folder, refuse_own, refuse_unknown
from rlcore.engines.sampling.sglang.versions import SAMPLER
from rlcore.errors import UnsupportedError

_OUTSIDE = "name it in build(), outside the engine arguments"
_ONE_HOST = "a replica is on one host"
_NO_SERVER = "rlcore starts no server"
_OWN = {
    "model_path": "it is the engine's path",
    "tokenizer_path": "it is the model folder's",
    "skip_tokenizer_init": "rlcore reads and writes text itself",
    "tokenizer_worker_num": "rlcore reads and writes text itself",
    "detokenizer_worker_num": "rlcore reads and writes text itself",
    "tp_size": f"it is tensor_parallel_size; {_OUTSIDE}",
    "dp_size": f"it is data_parallel_size; {_OUTSIDE}",
    "pp_size": "a replica is tensor-parallel only",
    "device": f"it is devices; {_OUTSIDE}",
    "base_gpu_id": f"it is devices; {_OUTSIDE}",
    "gpu_id_step": f"it is devices; {_OUTSIDE}",
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "dist_init_addr": _ONE_HOST,
    "nccl_port": "the ranks meet through a file",
    "host": _NO_SERVER,
    "port": _NO_SERVER,
    "api_key": _NO_SERVER,
    "enable_metrics": _NO_SERVER,
    "disaggregation_mode": "a replica both prefills and decodes",
    "sampling_backend": "log-probs are of the distribution that was sampled from, which rlcore's sampler gives",
    "speculative_algorithm": "rlcore's sampler draws one token at a time",
    "enable_memory_saver": "offload() and onload() need it as rlcore sets it",
    "enable_weights_cpu_backup": "offload() keeps the weights on the host",
    "weight_cache_mode": "weights come from the folder, or by a weight sync",
    "custom_sigquit_handler": "rlcore watches SGLang's processes",
    "sleep_on_idle": "an idle replica leaves its processor to others",
}
"""Arguments that the user cannot choose, and why."""
_OF_A_PROGRAM = {"model_path", "random_seed"}
_FLOAT32 = ("float32", "float")
_HOST_TOKENS = 1 << 15
"""The size of the KV cache on a host, in tokens: SGLang would take most of the host's memory."""


def engine_arguments(given: Mapping[str, Any], folder: ModelFolder, context: WorkerContext) -> dict[str, Any]:
    """Return all arguments of the engine that drives the context's devices; ``given`` are the user's.

    Raises:
        InvalidInputError, MissingDependencyError: as ``check_arguments``.
        UnsupportedError: float32 on a GPU.
    """
    check_arguments(given)
    _refuse_float32(given, context)
    device = context.device
    arguments = {
        "model_path": os.fspath(folder.path),
        "skip_tokenizer_init": True,
        "tp_size": len(context.devices),
        "device": device.torch_device.type,
        "sampling_backend": SAMPLER,
        "grammar_backend": "none",
        "sleep_on_idle": True,
        "watchdog_timeout": 1e9,  # it would take a long weight sync for a step that hangs
        "log_level": "error",
    }
    if device.spec.is_host:
        arguments |= {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": _HOST_TOKENS,
            "mem_fraction_static": 0.5,
        }
    else:
        arguments |= {"base_gpu_id": device.index, "enable_memory_saver": True}
    arguments |= given
    arguments["random_seed"] = given.get("random_seed", 0) + context.rank  # else all replicas would draw the same
    return arguments


def _refuse_float32(given: Mapping[str, Any], context: WorkerContext) -> None:
    """Its first kernel would fail in the scheduler, after minutes, with an error that names no dtype of the user's."""
    if given.get("dtype") in _FLOAT32 and not context.device.spec.is_host:
        raise UnsupportedError(
            f"dtype={given['dtype']!r} of the sglang executor on {context.device_name}",
            'SGLang\'s kernels for GPUs have bfloat16 and float16 alone; give build(dtype="bfloat16"), or take the '
            "executor hf or vllm",
        )


def in_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments that choose how SGLang lays its weights out: all but what differs between programs.

    A file, such as that of the places of experts, counts by its text.
    """
    found = []
    for name in sorted(arguments.keys() - _OF_A_PROGRAM):
        value = arguments[name]
        is_file = isinstance(value, str) and os.path.isfile(value)
        found.append(f"{name}={Path(value).read_bytes() if is_file else value!r}")
    return found


def check_arguments(given: Mapping[str, Any], python: str | os.PathLike[str] | None = None) -> None:
    """Check the names of arguments without importing SGLang.

    Args:
        python: the interpreter that has SGLang; None is this one.

    Raises:
        InvalidInputError: a name that only rlcore sets, or that this SGLang does not know; says the nearest one.
        MissingDependencyError: this interpreter has no SGLang.
    """
    refuse_own(given, _OWN, "sglang")
    package = package_folder("sglang", python, "sglang")
    names: list[str] = []
    if package:
        names = fields_of(package / "srt" / "server_args.py", "ServerArgs")
        for group in sorted((package / "srt" / "arg_groups" / "fields").glob("*.py")):  # of later versions
            names += fields_of(group)
    refuse_unknown(given, names, "SGLang")
