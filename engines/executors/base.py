"""The contract of executors: every method that an engine calls.

An executor is a class that a plugin registers by ``rlcore_register_executors``. Its instances are the workers: each is
made with a ``WorkerContext`` on the device that it names, and lives there until ``close``. The engine calls a method on
all workers at once, from the user's process. Arguments and results must be plain data, tensors, or of the classes named
here. The engine's residency table decides when a method may be called: none is called while a tag that it needs is not
on the device. Moves (``onload``, ``offload``, ``meta``, ``swap``) are in `rlcore.engines.executors.worker.Worker`.

The user gets the errors of a method: rlcore's own as they are, others as a WorkerError. An error of a worker leaves the
engine usable unless the docstring says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from rlcore.collectives.default_group import all_gather_bytes
from rlcore.engines.executors.train_options import LossOptions, ScoreOptions, StepOptions
from rlcore.engines.executors.worker import Worker
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.rank_batch import RankBatch
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt
from rlcore.engines.sampling.request_queue import PauseMode, RequestQueue
from rlcore.engines.weight_sync.channels.peers import call_each
from rlcore.errors import UnsupportedError
from rlcore.kernels.losses.interface import LossFn
from rlcore.nn import TrainModule, optimizers_of
from rlcore.types import OffloadReport
from rlcore.weights.view import Adapters

COLLECTIVE_TIMEOUT_S = 3600.0
"""Longer than a rank may wait for another; each call of a worker has a deadline of its own."""
_CLOSE_S = 2.0
"""How long receivers may take, when a trainer's worker closes, to close the memory that it shares."""


class _SyncEndpoint(Worker, ABC):
    """One side of a weight sync."""

    def sync_call(self, method: str, calls: list[tuple[object, ...]] | None) -> list[object]:
        """Call a method of this worker's end of a weight sync: its `Receiver`, or of a trainer its `Sender`.

        Args:
            calls: the arguments for each of the ends of this worker (a replica of four devices has four); None calls
                all without arguments.

        Returns:
            Each end's result, in their order.
        """
        return call_each(self.sync_ends, method, calls)


class InferenceExecutor(_SyncEndpoint):
    """One replica's worker: generates, and takes new weights. Tags: ``weights`` and ``kv_cache``.

    Requests have numbers, which the engine gives. Log-probs are those of the distribution sampled from, after
    temperature, top-k and top-p (``sampling/completion.py``). An executor that does not override ``submit`` and its
    companions has its requests wait until ``collect`` runs them by ``generate``.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._requests = RequestQueue(lambda prompts, params, at: self.generate(prompts, params, version=at))

    def meta(self, tag: str) -> OffloadReport:
        report = super().meta(tag)
        if tag == "weights":
            for receiver in self.sync_ends:
                receiver.lose_weights()
        return report

    @abstractmethod
    def build(self, path: str | Path, /, **options: object) -> None:
        """Load model and tokenizer, and fill ``offload_groups`` and ``sync_ends``. Called once, first.

        Args:
            path: a Hugging Face model folder with safetensors weights.
            options: the executor's own options of ``Engine.build``.

        Raises:
            CheckpointError: the folder is incomplete, damaged, or not a causal language model.
            InvalidInputError: an option is out of range.
            UnsupportedError: the executor cannot run this architecture.
        """

    @abstractmethod
    def check_prompts(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, numbers: Sequence[int]
    ) -> list[Sequence[int]] | None:
        """Refuse what ``generate`` would refuse of these prompts; called on all replicas before any of them begins.

        Args:
            numbers: what errors call each of the prompts.

        Returns:
            The token ids of each prompt, which are then sent to ``generate`` or ``submit`` in its place; None sends
            the prompts as they are.

        Raises:
            InvalidInputError: names the prompt by its number, and what is wrong with it or its parameters.
        """

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> list[RequestOutput]:
        """Sample completions; needs all tags on the device.

        When completions end, ``emit`` is called with their number, for the user's progress bar.

        Args:
            prompts: texts, or token ids, at least one token each.
            params: one for each prompt.
            version: the version of the weights in use, for ``version_spans``.

        Returns:
            One output a prompt, in their order, with ``n`` completions by sample index.

        Raises:
            InvalidInputError: names the prompt and what is wrong with it or its parameters.
            RlcoreError: the model gives NaN or infinite logits.
        """

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> None:
        """Take these requests, whose outputs ``collect`` gives by these numbers: all of them or, with an error, none.

        Raises:
            UnsupportedError: this executor cannot run requests beside the program here.
        """
        self._requests.submit(numbers, prompts, params)

    def collect(self, timeout_s: float, *, version: int) -> dict[int, RequestOutput]:
        """Return the requests that have ended since the last call, by number; wait up to ``timeout_s`` for the first.

        An executor that does not generate in the background runs the submitted requests here, unless paused, for as
        long as they take.
        """
        return self._requests.collect(version)

    def abort(self, numbers: Sequence[int] | None) -> int:
        """Cancel these requests, or all for None. Return how many were unfinished; none of them is collected."""
        return self._requests.abort(numbers)

    def pause(self, mode: PauseMode, *, version: int) -> None:
        """Make no further step. By ``mode`` requests are kept as they are, aborted, or run to their end first."""
        self._requests.pause(mode, version)

    def resume(self) -> None:
        """Go on after ``pause``; without a pause do nothing."""
        self._requests.resume()

    def activations(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """Return what each part of the model computes of one sequence, by the names of ``rlcore.activations``.

        Raises:
            UnsupportedError: this executor cannot look inside its model.
        """
        raise UnsupportedError(f"activations() of {type(self).__name__}", "it does not define the method")

    @abstractmethod
    def read_weights(self, path: str | Path) -> None:
        """Read or check the weights of a folder of the same model, for ``take_weights``; change nothing yet.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            SyncError: it holds another model.
        """

    @abstractmethod
    def take_weights(self, *, version: int) -> None:
        """Overwrite the weights by those of ``read_weights``. After an error the engine is poisoned."""


class TrainExecutor(_SyncEndpoint):
    """One rank's worker: owns its shards of the user's module. Tags: ``weights``, ``optimizer`` and ``grads``.

    All ranks are called together, so a method may use collectives of ``context.process_group()``. The user's own
    methods are called on the attribute ``module``.
    """

    runs_user_code: ClassVar[bool] = True
    module: TrainModule

    @classmethod
    def check_packages(cls) -> None:
        """Raise unless the packages of this executor are there; called in the user's process before a worker starts.

        Raises:
            MissingDependencyError: names the command that installs what is missing.
            UnsupportedError: a package is too old.
        """

    @abstractmethod
    def build(self, module: TrainModule, seed: int, /, **options: object) -> bool:
        """Shard and materialize the module, and fill ``offload_groups`` and ``sync_ends``. Called once, first.

        Args:
            module: on the meta device; ``module.on_weights_materialized()`` is called when its weights are there.
            seed: for the random numbers of parameters that the source does not have.
            options: the executor's own options of ``Engine.build``.

        Returns:
            True if the module has an optimizer.

        Raises:
            CheckpointError: the module's source is missing, damaged or does not fit.
        """

    def has_optimizer(self) -> bool:
        """Return True if the module has an optimizer by now; a method of it may have made one since ``build``."""
        return bool(optimizers_of(self.module))

    @abstractmethod
    def train_step(self, batch: RankBatch, loss_fn: LossFn, options: StepOptions) -> dict[str, float]:
        """Run one optimizer step on this rank's part of the batch: forward, backward, clip, step, zero.

        Gradients are those of the loss over the whole batch, however it is cut into micro-batches and ranks.

        Returns:
            The metrics, the same on all ranks.
        """

    @abstractmethod
    def evaluate(self, batch: RankBatch, loss_fn: LossFn, options: LossOptions) -> dict[str, float]:
        """Return the metrics of ``train_step`` without gradients; nothing is changed."""

    @abstractmethod
    def score(self, batch: RankBatch, options: ScoreOptions) -> Tensor:
        """Return the log-prob of each token of the whole batch, [T] float32 in host memory, the same on all ranks."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, which call it together."""
        self.context.process_group(COLLECTIVE_TIMEOUT_S)
        return all_gather_bytes(data, self.device.torch_device)

    @abstractmethod
    def state_dict(self, adapters: Adapters) -> dict[str, Tensor]:
        """Return whole weights in host memory by their checkpoint names.

        The engine reads the answer of rank 0, and under torchrun each rank its own; other ranks may return {}.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the weights by whole ones.

        Raises:
            InvalidInputError: names, shapes or kinds of dtypes differ; nothing is changed.
        """

    def save(self, folder: Path, extra: dict[str, object], blocking: bool, algorithm: str) -> tuple[str, float]:
        """Write this rank's part of a checkpoint, with its state at the time of the call.

        Args:
            extra: the user's plain values.
            blocking: True returns when the checkpoint is complete; False writes it in the background.
            algorithm: name of the digests' algorithm.

        Returns:
            The name of the checkpoint's data, and the seconds that training had to wait.

        Raises:
            UnsupportedError: this executor writes no checkpoints; ``load`` and ``export`` raise it likewise.
        """
        raise self._unsupported("save")

    def end_save(self) -> float | None:
        """Wait for a save in the background. Return the seconds it took, None without one; raise its error."""
        return None

    def is_save_over(self) -> bool:
        """Return True unless a save is being written in the background."""
        return True

    def load(self, folder: Path) -> dict[str, object]:
        """Continue from a checkpoint of any number of ranks; return the ``extra`` that was saved.

        Raises:
            CheckpointError: missing, damaged or of another module; nothing is changed on any rank.
        """
        raise self._unsupported("load")

    def export(self, folder: Path, max_shard_bytes: int, algorithm: str) -> None:
        """Write a Hugging Face model folder; all ranks call it together, and one writes."""
        raise self._unsupported("export")

    def close(self) -> None:
        for end in self.sync_ends:
            end.close(_CLOSE_S)
        self.sync_ends.clear()
        super().close()

    def _unsupported(self, method: str) -> UnsupportedError:
        return UnsupportedError(f"{method}() of {type(self).__name__}", "this train executor does not override it")
