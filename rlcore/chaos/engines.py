"""The engines of a round's program, and what is known of their weights and of the checkpoints."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlcore
from rlcore.chaos.checks import (
    ViolationError,
    Weights,
    check_checkpoint,
    check_log_probs,
    require,
    same,
    strays,
)
from rlcore.chaos.model import policy
from rlcore.chaos.plan import EngineLayout
from rlcore.conformance.tiny_model import changed
from rlcore.errors import RlcoreError, StateError, WorkerError

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
_PARAMS = {"max_tokens": 6, "seed": 0, "ignore_eos": True}
_MOST_APART = 1e-3
"""The most by which log-probs of sampler and trainer, both in float32, may differ; a tensor of another version makes
them differ by more than 0.01."""
_MOST_APART_OF_OTHERS = 1e-2
"""The same for samplers with kernels of their own."""
PATIENT_S, SHORT_S = 120.0, 10.0
"""How long a call may take, on however busy a machine; and one that is to meet its deadline."""


class Engines:
    """A trainer, a sampler and a folder of checkpoints.

    Args:
        scratch: the folder of the round.
    """

    def __init__(self, layout: EngineLayout, scratch: Path) -> None:
        self.layout, self.scratch = layout, scratch
        self.model, self.checkpoints = scratch / "model", scratch / "checkpoint"
        self.train: Any = None
        self.infer: Any = None
        self.patience_s = PATIENT_S
        self.makers: set[int] = set()
        """Ids of all worker processes that there were."""
        self.saves: dict[int, Weights] = {}
        """The weights of each save that was begun, by its number."""
        self.last: set[int] = set()
        """The saves that the folder may hold; empty before one has ended."""
        self.numbers = 0
        self.has_saved = False
        """This trainer has a checkpoint to go back to."""
        self.between: Callable[[], None] = _nothing
        """Called in the middle of some steps, for a fault whose moment that is."""
        self.mischief = ""
        """The kind of mischief that the control channel makes."""
        self._of_model: list[float] = []
        """Log-probs that a new sampler gives for ``PROMPTS``."""
        self._served: list[float] = []
        """The outputs that it gave when it was last seen to be whole."""

    # ---------------------------------------------------------------------------------------------- life

    def build(self) -> None:
        """Build what is not built."""
        if self.train is None:
            with rlcore.meta_device():
                module = policy(self.model)
            self.train = _built(
                rlcore.TrainEngine(module),
                devices=self.layout.trainers,
                data_parallel_size=len(self.layout.trainers),
            )
            self.initial, self.has_saved = self.train.state_dict(), False
        if self.infer is None:
            options = _VLLM if self.layout.executor == "vllm" else {}
            engine = rlcore.InferenceEngine(self.model, executor=self.layout.executor)
            self.infer = _built(engine, devices=self.layout.sampler, dtype="float32", **options)
            self._of_model = self._of_model or _log_probs(self.serve())
            self._served = self._of_model
        self.note_makers()

    def note_makers(self) -> None:
        self.makers |= {worker.process_id for engine in self.built for worker in engine.executors[0].workers}

    @property
    def built(self) -> list[Any]:
        return [engine for engine in (self.train, self.infer) if engine is not None and engine.is_built]

    @property
    def are_together(self) -> bool:
        """Some workers of both engines share a process."""
        return self.layout.sampler in self.layout.trainers

    def close(self) -> None:
        train, infer, self.train, self.infer = self.train, self.infer, None, None
        try:
            if train is not None:
                train.close()
        finally:
            if infer is not None:
                infer.close()

    def be_patient(self, patience_s: float) -> None:
        """Set the deadline of every call from now on; the engines have no public way to change it once built."""
        self.patience_s = patience_s
        for engine in self.built:
            engine.executors[0]._timeout_s = patience_s

    def complaint(self) -> RlcoreError | None:
        """Return the error by which the engines tell that their workers have ended."""
        found: RlcoreError | None = None
        for engine in self.built:
            try:
                engine.memory_report()
            except RlcoreError as error:
                found = found or error
        return found

    def recover(self) -> None:
        """Restart what a fault has ended, build what it has closed, and bring all to the device."""
        self.be_patient(PATIENT_S)
        for engine in self.built:
            try:
                engine.memory_report()
            except (StateError, WorkerError):
                engine.restart()
                if engine is self.train:
                    self._check_restarted()
                else:
                    self._served = self._of_model
        self.build()
        self.note_makers()
        for engine in self.built:
            with contextlib.suppress(StateError):  # empty weights, which a sync fills
                engine.onload()

    # ------------------------------------------------------------------------------------------- weights

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def renew_weights(self) -> None:
        """Give the trainer weights of which every tensor differs from those before."""
        self._sent = changed(self.initial, self.next_number())
        self.train.load_state_dict(self._sent)

    def learn(self, draw: random.Random) -> dict[str, float]:
        """Take a training step; return its metrics."""
        metrics: dict[str, float] = self.train.train_batch(_batch(draw), _surrogate)
        return metrics

    def begin_save(self) -> int:
        """Note the save that begins now, and may or may not become the last; return its number."""
        number = self.next_number()
        self.saves[number] = self.train.state_dict()
        self.last.add(number)
        return number

    def end_save(self, number: int) -> None:
        """Note that a save has ended well: no earlier one can be the last now."""
        self.last, self.has_saved = {number}, True

    def _check_restarted(self) -> None:
        """Check that the trainer continues from the last checkpoint, or from the model."""
        found = self.train.state_dict()
        possible = [self.saves[number] for number in self.last] + [self.initial] * (not self.has_saved)
        require(
            any(same(found, weights) for weights in possible),
            "after restart() the trainer has weights of no checkpoint that may be the last",
        )

    @property
    def _has_checkpoint(self) -> bool:
        return (self.checkpoints / "manifest.json").exists()

    def check_folder(self) -> None:
        if self._has_checkpoint:
            check_checkpoint(self.checkpoints, self.last)

    def save(self) -> None:
        """Save, and see that nothing but the checkpoint is in its folder."""
        number = self.begin_save()
        self.train.save(self.checkpoints, {"number": number})
        self.end_save(number)
        self.check_folder()
        found = strays(self.checkpoints)
        require(not found, f"after a complete save its folder has files of no checkpoint: {', '.join(found)}")

    def serve(self) -> Any:
        return self.infer.generate(PROMPTS, _PARAMS, progress=False)

    def check_serving(self) -> None:
        """Check that after a failed sync the sampler refuses, or serves its old weights or the trainer's, whole."""
        if self.infer is None or self.infer.sync_state != "serving" or set(self.infer.state.values()) != {"loaded"}:
            return
        outputs = self.serve()
        if self._served and _is_near(_log_probs(outputs), self._served, self._limit):
            return
        self.train.load_state_dict(self._sent)  # it may have gone back to a checkpoint
        self._compare(outputs, "the sampler serves neither its old weights nor the new ones")

    def check_whole(self) -> None:
        """Check that a complete sync has given the sampler the trainer's weights."""
        self.renew_weights()
        try:
            self.train.sync_weights(self.infer)
        except RlcoreError as error:
            raise ViolationError(f"after the fault was over a sync failed: {error}") from error
        outputs = self.serve()
        self._compare(outputs, "after a complete sync the sampler does not serve the trainer's weights")
        self._served = _log_probs(outputs)

    def _compare(self, outputs: Any, promise: str) -> None:
        batch = rlcore.collate(outputs)
        mask = batch["loss_mask"].bool()
        check_log_probs(batch["old_logprobs"], self.train.forward_logprobs(batch), mask, self._limit, promise)

    @property
    def _limit(self) -> float:
        return _MOST_APART if self.layout.executor == "hf" else _MOST_APART_OF_OTHERS


def _nothing() -> None:
    pass


def _built(engine: Any, **options: Any) -> Any:
    try:
        return engine.build(launcher="process", timeout_s=PATIENT_S, **options)
    except BaseException:
        engine.close()
        raise


_VLLM: dict[str, Any] = {"max_model_len": 128, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}


def _log_probs(outputs: Any) -> list[float]:
    return [value for output in outputs for completion in output.outputs for value in completion.logprobs]


def _is_near(found: list[float], expected: list[float], limit: float) -> bool:
    return torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=limit)


def _batch(draw: random.Random) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    lengths = torch.tensor([12, 5, 9, 7])
    mask_NL = torch.arange(12) < lengths[:, None]
    return {
        "input_ids": torch.randint(40, mask_NL.shape, generator=generator),
        "attention_mask": mask_NL,
        "advantages": torch.randn(len(lengths), generator=generator),
    }


def _surrogate(logprob: Tensor, entropy: Tensor, per_token: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprob * per_token["advantages"], {"logprob_mean": logprob}
