"""After an allocation has failed in a step: what to change so that it fits, found by plans of the same step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcore.engines.executors.worker import MemoryReport
from rlcore.engines.fsdp2.sharding import Sharding
from rlcore.engines.memory_plan.allocator import PlannedMemoryError
from rlcore.engines.memory_plan.trainer import PlannedTrainer, batch_of, score_options, step_options
from rlcore.errors import one_line
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.nn import TrainModule
from rlcore.planned import PlannedDevice

_GENERAL = (
    "Use a smaller max_tokens_per_micro_batch, build with activation_checkpointing=True, or offload what other engines "
    "hold on this device; rlcore plan says what fits."
)


@dataclass(frozen=True, slots=True)
class Failed:
    """The call that failed."""

    lengths: Sequence[int]
    """Tokens of each sequence."""
    max_tokens: int
    trains: bool
    """False: it only scored."""
    executor: str
    options: Mapping[str, Any]
    """Its build options."""


def advice(module: TrainModule, failed: Failed, device: PlannedDevice, report: MemoryReport, num_workers: int) -> str:
    """Return sentences: the largest micro-batch that fits, and whether recomputation does.

    Args:
        module: the engine's own, on the meta device.
        report: of the worker that failed, or of one like it.
    """
    if failed.executor != "fsdp2" or num_workers > 1 or failed.options.get("compile"):
        return f"To make it fit: {_GENERAL}"
    try:
        return " ".join(_sentences(module, failed, device, report))
    except Exception as error:  # of a plan, and no second error for the user
        return f"To make it fit: {_GENERAL} (No plan of this step could be made: {one_line(error)})"


def _sentences(module: TrainModule, failed: Failed, device: PlannedDevice, report: MemoryReport) -> Iterator[str]:
    room, sharding = _room(report), Sharding(**failed.options)
    others = report["stats"].allocated_bytes - sum(tag["device_bytes"] for tag in report["tags"].values())
    yield f"By its plan, this step has {room} bytes for its tensors on {report['device']}."

    def fits(sharding: Sharding, tokens: int) -> bool:
        try:
            _run(module, sharding, device, replace(failed, max_tokens=tokens), room)
        except PlannedMemoryError:
            return False
        return True

    smaller = next((tokens for tokens in _smaller(failed) if fits(sharding, tokens)), None)
    if smaller is not None:
        yield f"It fits with max_tokens_per_micro_batch={smaller} (it was {failed.max_tokens})."
    again = replace(sharding, activation_checkpointing=True)
    if failed.trains and sharding.activation_checkpointing is not True:
        tokens = next((one for one in (failed.max_tokens, *_smaller(failed)) if fits(again, one)), None)
        if tokens is not None:
            yield f"Built with activation_checkpointing=True it fits with max_tokens_per_micro_batch={tokens}."
            smaller = smaller or tokens
    if smaller is None:
        yield (
            "It fits with no micro-batch that holds the longest sequence: cut the weights over more devices "
            "(data_parallel_size=), train adapters, or shorten the sequences."
        )
    if others > 0:
        yield f"{others} bytes are tensors of others in this process: offload the engines that have them."


def _room(report: MemoryReport) -> int:
    """Return what the tensors of this engine can have: what is free and cached, and what its tags have now."""
    stats, own = report["stats"], sum(tag["device_bytes"] for tag in report["tags"].values())
    cached = max(0, stats.reserved_bytes - stats.allocated_bytes)
    return report["info"].free_bytes + cached + own


def _smaller(failed: Failed) -> Iterator[int]:
    """Yield ever smaller micro-batches, down to the longest sequence."""
    longest = max(failed.lengths)
    sizes = itertools.takewhile(lambda size: size > longest, (failed.max_tokens >> times for times in range(1, 32)))
    return itertools.chain(sizes, [longest] if longest < failed.max_tokens else [])


def _run(module: TrainModule, sharding: Sharding, device: PlannedDevice, failed: Failed, room: int) -> None:
    """Run a step of full micro-batches, at most two. Raises PlannedMemoryError if it takes more than ``room``."""
    trainer = PlannedTrainer(module, sharding, device, room)
    lengths, most = sorted(failed.lengths, reverse=True), failed.max_tokens
    chosen = [length for length, end in zip(lengths, itertools.accumulate(lengths), strict=True) if end <= most]
    if not failed.trains:
        trainer.score(batch_of(chosen), score_options(most))
        return
    batch = batch_of(chosen * (1 if len(chosen) == len(lengths) else 2))  # the first micro-batch keeps its gradients
    trainer.train_settled(batch, ppo_clip(), step_options(most))
