"""Traces of one model, each made once: by recomputation and tokens of a micro-batch."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlcore.engines.executors.materialize import retype
from rlcore.engines.fsdp2.sharding import Sharding
from rlcore.engines.memory_plan.ranks import GatheredBytes, gathered
from rlcore.engines.memory_plan.trainer import PhasePeak, PlannedTrainer, batch_of, score_options, step_options
from rlcore.errors import RlcoreError, UnsupportedError, one_line
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.planning.hardware import Hardware
from rlcore.planning.layout import Recompute
from rlcore.planning.model import PlannedModel

_MICRO_BATCHES = 2
"""A traced step has so many; those after the second would find what it found."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The memory of one device that has the whole model."""

    score: PhasePeak
    train: PhasePeak
    """The peak of a step after others, with the operations of one of its micro-batches."""


class Traces:
    """The traces of one model on one kind of device.

    Args:
        longest: the tokens of the longest sequence.
        prompt_tokens: tokens at the start of each sequence that are not trained on.
        options: the build options of the train engine that all traces share.
    """

    def __init__(
        self, model: PlannedModel, device: Hardware, longest: int, prompt_tokens: int, options: dict[str, Any]
    ) -> None:
        self.model, self.device = model, device
        self.longest, self.prompt_tokens, self.options = longest, prompt_tokens, options
        self._traced = functools.cache(self._trace)
        self.gathered = functools.cache(self._gathered)

    def sharding(self, recompute: Recompute, sequence_parallel: int = 1) -> Sharding:
        found = {"activation_checkpointing": recompute, "sequence_parallel_size": sequence_parallel}
        return Sharding(**self.options | found)

    def _gathered(self, shards: int) -> GatheredBytes:
        return gathered(self.model.module, self.sharding(recompute=False), shards)

    def held(self, shards: int) -> dict[str, int]:
        """Return the bytes that one of ``shards`` devices holds between two steps, by what they are."""
        found, whole = self._settled.held(), self._settled.scalar_bytes
        optimizer = whole + -(-(found.get("optimizer", 0) - whole) // shards)
        return {"weights": -(-found["weights"] // shards), "optimizer": optimizer, "buffers": found.get("buffers", 0)}

    @functools.cached_property
    def _settled(self) -> PlannedTrainer:
        trainer = self._trainer(self.sharding(recompute=False))
        trainer.make_optimizer_state()
        return trainer

    def lengths(self, max_tokens: int) -> list[int]:
        """Return the sequences of a full micro-batch, the longest there are."""
        count, rest = divmod(max_tokens, self.longest)
        return [self.longest] * count + ([rest] if rest > 1 else [])

    def trace(
        self, recompute: Recompute, max_tokens: int, *, sequence_parallel: int = 1, is_gathered: bool = False
    ) -> StepTrace:
        """Trace scoring and training of one full micro-batch.

        Args:
            sequence_parallel: devices that share the tokens of each micro-batch.
            is_gathered: parameters have the compute dtype, as those that FSDP has gathered: nothing is cast.
        """
        sharding = self.sharding(recompute, sequence_parallel)
        if is_gathered:
            sharding = replace(sharding, dtype=sharding.compute_dtype or sharding.dtype)
        return self._traced(sharding, max_tokens)

    def _trace(self, sharding: Sharding, max_tokens: int) -> StepTrace:
        """Score a full micro-batch, and train a step of two: the allocator keeps what earlier ones have left it."""
        lengths, options = self.lengths(max_tokens), step_options(max_tokens)
        batch = batch_of(lengths * _MICRO_BATCHES, self.prompt_tokens)
        with _on_meta_tensors(f"a step of {self.model.name}"):
            scorer = self._trainer(sharding)
            scorer.make_optimizer_state()
            score = scorer.score(batch_of(lengths, self.prompt_tokens), score_options(max_tokens))
            train = self._trainer(sharding).train_settled(batch, ppo_clip(), options)
        return StepTrace(score, replace(train, flops=train.flops // _MICRO_BATCHES))

    def _trainer(self, sharding: Sharding) -> PlannedTrainer:
        return PlannedTrainer(self.model.module, sharding, self.device.planned)


def cache_bytes_per_token(model: PlannedModel) -> int:
    """Return the bytes of keys and values of one token in the model's own cache, in bfloat16; 0 if it has none.

    Layers that keep one state for a whole sequence, as linear attention does, hold nothing for a token.

    Raises:
        UnsupportedError: the model's own code fails on meta tensors.
    """
    if model.config is None:
        return 0
    num_tokens, decoder = 16, copy.deepcopy(model.module.get_decoder())  # type: ignore[operator]
    retype(decoder, torch.bfloat16, torch.bfloat16)
    with torch.device("meta"), torch.no_grad():
        decoder.to("meta")
        tokens = torch.zeros(1, num_tokens, dtype=torch.long)
        with _on_meta_tensors(f"the keys and values of {model.name}"):
            output = decoder(input_ids=tokens, use_cache=True)
    layers = getattr(getattr(output, "past_key_values", None), "layers", ())
    held = [layer.keys.nbytes + layer.values.nbytes for layer in layers if getattr(layer, "keys", None) is not None]
    return int(sum(held)) // num_tokens


@contextlib.contextmanager
def _on_meta_tensors(part: str) -> Iterator[None]:
    """Inside, what the model's own code raises says that there is no plan of ``part``.

    It may be a fault of the configuration, or of code that needs values and works elsewhere: its own text tells.
    """
    try:
        yield
    except RlcoreError:
        raise
    except Exception as error:
        raise UnsupportedError(f"a plan of {part}", f"its code fails on meta tensors with {one_line(error)}") from error
