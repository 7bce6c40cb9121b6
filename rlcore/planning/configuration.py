"""A file of ``rlcore train`` as the arguments of a plan."""

from __future__ import annotations

from typing import Any

from rlcore.configuration_file import read_configuration
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.planning.model import adamw_of
from rlcore.training.config import TrainConfig


def arguments_of(file: str) -> dict[str, Any]:
    """Return the arguments of ``rlcore.plan``. The longest prompt is not in the file, and counts as one more answer.

    Raises:
        InvalidInputError: the file is not one of rlcore train.
        UnsupportedError: its trainer is not planned.
    """
    config = read_configuration(file, [], TrainConfig)
    trainer = config.trainer
    if trainer.executor != "fsdp2":
        raise UnsupportedError(f"a plan of trainer.executor={trainer.executor!r}", "plans follow the steps of fsdp2")
    options = dict(trainer.options)
    replicas, recompute = options.pop("replicas", 1), options.pop("activation_checkpointing", False)
    if not isinstance(replicas, int):
        raise InvalidInputError(f"trainer.options.replicas must be a whole number, got {replicas!r}")
    return {
        "model": config.model,
        "count": trainer.data_parallel_size * replicas,
        "replicas": replicas,
        "recompute": recompute,
        "max_tokens": trainer.max_tokens_per_micro_batch,
        "longest": 2 * config.rollout.max_tokens,
        "prompt_tokens": config.rollout.max_tokens,
        "tensor_parallel": config.sampler.tensor_parallel_size,
        "sampler": config.placement == "shared",
        "options": options,
        "optimizer": adamw_of(),
    }
