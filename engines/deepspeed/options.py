"""The build options of the executor ``deepspeed``, and the configuration that DeepSpeed gets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlcore.errors import InvalidInputError, UnsupportedError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STAGES = (1, 2, 3)
_OWNED = {
    "train_batch_size": "micro-batches are cut by train_batch(max_tokens_per_micro_batch=...)",
    "train_micro_batch_size_per_gpu": "micro-batches are cut by train_batch(max_tokens_per_micro_batch=...)",
    "gradient_accumulation_steps": "a step has as many micro-batches as its batch needs",
    "managed_gradient_accumulation": "train_batch() says where a step ends",
    "gradient_clipping": "it is train_batch(max_grad_norm=...)",
    "optimizer": "it is an attribute of the module, made in on_weights_materialized()",
    "scheduler": "it is an attribute of the module, made in on_weights_materialized()",
    "zero_allow_untested_optimizer": "the module's optimizer is used whatever it is",
    "bf16": "it is the option compute_dtype='bfloat16'",
    "fp16": "there is no loss scaling here; use compute_dtype='bfloat16'",
    "amp": "use compute_dtype='bfloat16'",
    "torch_autocast": "use compute_dtype='bfloat16'",
    "data_types": "gradients are summed in float32",
    "communication_data_type": "gradients are reduced in float32",
    "tensor_parallel": "this executor shards over data-parallel ranks only",
    "sequence_parallel_size": "this executor shards over data-parallel ranks only",
    "data_parallel_size": "it is data_parallel_size= of build()",
    "pipeline": "this executor shards over data-parallel ranks only",
    "expert_parallel": "this executor shards over data-parallel ranks only",
    "compile": "DeepCompile replaces the hooks that this executor uses",
    "checkpoint": "checkpoints are rlcore's",
    "hybrid_engine": "completions come of an inference engine",
}
"""Keys that ``config`` may not have, with what to use instead."""
_OWNED_OF_ZERO = {
    "stage": "it is the option stage",
    "reduce_bucket_size": "it is the option bucket_elements",
    "stage3_param_persistence_threshold": "it is the option persist_below",
    "overlap_comm": "it is the option overlap_comm",
    "offload_optimizer": "the optimizer leaves the device by offload('optimizer')",
    "offload_param": "weights leave the device by offload('weights')",
    "cpu_offload": "the optimizer leaves the device by offload('optimizer')",
    "round_robin_gradients": "the parts of the ranks must follow the order of the parameters",
    "parameter_alignment": "the parts of the ranks must follow each other without gaps",
    "zero_hpz_partition_size": "weight sync reads the first partition alone",
    "zero_quantized_weights": "weight sync reads the partitions as they are",
    "zero_quantized_nontrainable_weights": "weight sync reads the partitions as they are",
    "mics_shard_size": "weights are sharded over all workers",
    "sub_group_size": "a parameter group is stepped at once",
    "zenflow": "it is not implemented",
    "super_offload": "it is not implemented",
}
"""Keys that ``config["zero_optimization"]`` may not have, with what to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptions:
    """The build options of the executor ``deepspeed``: the ZeRO stage, and how it computes and communicates.

    Optimizer states, and the weights that the optimizer steps, are float32.
    """

    stage: int = 3
    """1 shards the optimizer's states over the ranks, 2 the gradients too, 3 also the weights."""
    compute_dtype: str = "float32"
    """Dtype of the weights that the module computes with: "float32" or "bfloat16". Gradients are summed and reduced in
    float32."""
    overlap_comm: bool = True
    """Exchange gradients while the backward goes on. ZeRO 1 exchanges them at the end."""
    bucket_elements: int = 50_000_000
    """Elements of gradients that are exchanged at once. The buffer is as large, but no larger than the module."""
    persist_below: int = 0
    """ZeRO 3 keeps parameters of fewer elements whole on each rank after their first use in a step."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a DeepSpeed configuration. Those that this executor sets itself are refused."""

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in _STAGES:
            raise InvalidInputError(f"stage must be 1, 2 or 3, the stage of ZeRO, got {self.stage!r}")
        if self.compute_dtype not in list(_DTYPES):  # a list: some values have no hash
            raise InvalidInputError(f"compute_dtype must be one of {', '.join(_DTYPES)}, got {self.compute_dtype!r}")
        if not isinstance(self.overlap_comm, bool):
            raise InvalidInputError(f"overlap_comm must be True or False, got {self.overlap_comm!r}")
        for name, least in (("bucket_elements", 1), ("persist_below", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidInputError(f"{name} must be a whole number of at least {least}, got {value!r}")
        _check_config(self.config)
        if self.stage == 1 and self.compute_dtype != "float32":
            raise UnsupportedError(
                "compute_dtype='bfloat16' with stage=1",
                "DeepSpeed takes another optimizer for it; use stage=2, which needs less memory",
            )

    @property
    def torch_compute_dtype(self) -> torch.dtype:
        return _DTYPES[self.compute_dtype]

    def deepspeed_config(self, num_elements: int) -> dict[str, Any]:
        """Return the configuration for ``deepspeed.initialize``.

        Args:
            num_elements: of all parameters of the module.
        """
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": self.overlap_comm and self.stage > 1,
            "reduce_bucket_size": max(1, min(self.bucket_elements, num_elements)),
            "sub_group_size": max(1, num_elements),
        }
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = self.persist_below
        own: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 62,
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
        if self.compute_dtype == "bfloat16":
            own["bf16"] = {"enabled": True, "check_grad_overflow": True}
        given = dict(self.config)
        return own | given | {"zero_optimization": zero | dict(given.get("zero_optimization", {}))}


def _check_config(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"config must be a dict of DeepSpeed's keys, got {type(config).__name__}")
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise InvalidInputError(f"config['zero_optimization'] must be a dict, got {type(zero).__name__}")
    for where, given, owned in (("config", config, _OWNED), ("config['zero_optimization']", zero, _OWNED_OF_ZERO)):
        for name in given:
            if name in owned:
                raise InvalidInputError(f"{where} may not have {name!r}: {owned[name]}")
