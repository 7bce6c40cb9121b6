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
    replicas, sequences = (_size(options, name) for name in ("replicas", "sequence_parallel_size"))
    recompute = options.pop("activation_checkpointing", False)
    return {
        "model": config.model,
        "count": trainer.data_parallel_size * replicas * sequences,
        "replicas": replicas,
        "sequence_parallel": sequences,
        "recompute": recompute,
        "max_tokens": trainer.max_tokens_per_micro_batch,
        "longest": 2 * config.rollout.max_tokens,
        "prompt_tokens": config.rollout.max_tokens,
        "tensor_parallel": config.sampler.tensor_parallel_size,
        "sampler": config.placement == "shared",
        "options": options,
        "optimizer": adamw_of(),
    }


def _size(options: dict[str, Any], name: str) -> int:
    """Take a number of devices out of the trainer's options."""
    size = options.pop(name, 1)
    if not isinstance(size, int):
        raise InvalidInputError(f"trainer.options.{name} must be a whole number, got {size!r}")
    return size
