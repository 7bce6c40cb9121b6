"""``InferenceEngine``: generates with a model folder, and takes new weights from a ``TrainEngine``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from rlcore.arguments import FLAG, PATH, TEXT, optional, takes
from rlcore.engines.engine import Engine
from rlcore.engines.executors.base import InferenceExecutor
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.residency import Move, State
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.progress import progress_bar
from rlcore.engines.sampling.prompts import ParamsLike, Prompt, params_of_each, prompts_of
from rlcore.engines.sampling.serving import AsynchronousRequests, Calls, Serving, check_prompts, cost_of, spread
from rlcore.engines.weight_sync.engines import ReceivingEngine, poisoned
from rlcore.errors import StateError


class SyncState(StrEnum):
    """Whether the weights in the engine are whole."""

    SERVING = "serving"
    PAUSED = "paused"
    """A weight sync is under way; the old weights are whole."""
    POISONED = "poisoned"


class InferenceEngine(AsynchronousRequests, Engine, ReceivingEngine):
    """Generates completions.

    Args:
        path: a Hugging Face model folder.
        executor: name of a registered inference executor.
    """

    kind: ClassVar[str] = "inference"
    tags: ClassVar[tuple[str, ...]] = ("weights", "kv_cache")

    @takes("InferenceEngine", path=PATH, executor=TEXT)
    def __init__(self, path: str | Path, *, executor: str = "hf") -> None:
        self._path = Path(path)
        self._version = 0
        self._sync_state = SyncState.SERVING
        self._contents = object()
        self._serving = Serving()
        super().__init__(executor)

    def _check(self, options: dict[str, Any], python: str | os.PathLike[str] | None) -> None:
        self._executor_class.check(self._path, options, python)

    @property
    def _refill(self) -> str:
        return "sync_weights() into it or load(path)"

    def _build_workers(self, options: dict[str, Any]) -> None:
        self._serving = Serving()
        self._call(InferenceExecutor.build, self._path, **options)
        self._version, self._sync_state = 0, SyncState.SERVING
        self._contents = object()

    # -------------------------------------------------------------------------------------------- generate

    @takes("generate()", progress=optional(FLAG))
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Sample completions.

        Args:
            prompts: texts, or token ids.
            sampling_params: for all prompts or one for each; a ``SamplingParams`` or a dict of its fields.
            progress: show a progress bar on stderr; None does so on a terminal.

        Returns:
            One output a prompt, in order: ``outputs[i].outputs[j].token_ids``.

        Raises:
            StateError: weights or KV cache are not on the device, or the weights are not whole.
            InvalidInputError: an unknown sampling parameter, one out of range, an empty or too long prompt.
        """
        self._require_ready("generate()")
        texts = prompts_of(prompts)
        num_completions = _num_completions(len(texts), sampling_params)
        with progress_bar("Generating", num_completions, progress) as advance:
            return self._spread(texts, params_of_each(texts, sampling_params), advance)

    def _spread(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], advance: Callable[[int], None]
    ) -> list[RequestOutput]:
        """Each replica completes its share; the outputs in the prompts' order."""
        group = self._built_group()
        if len(group.workers) > 1:  # a single one reads all of them before it begins
            check_prompts(group, prompts, params)
        costs = [cost_of(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        ranks = spread(costs, self._serving.loads(len(group.workers)))
        shares = [[index for index, at in enumerate(ranks) if at == rank] for rank in range(len(group.workers))]
        calls: Calls = [
            (([prompts[index] for index in own], [params[index] for index in own]), {"version": self._version})
            for own in shares
        ]
        found: dict[int, RequestOutput] = {}
        for own, outputs in zip(shares, group.call(InferenceExecutor.generate.__name__, calls, advance), strict=True):
            found |= zip(own, outputs, strict=True)
        return [found[index] for index in range(len(prompts))]

    def _require_ready(self, purpose: str) -> None:
        self._built_group()
        self._require_serving(purpose)
        for tag in self.tags:
            self._require(tag, purpose)

    # ------------------------------------------------------------------------------------------------ sync

    @property
    def version(self) -> int:
        """Number of the weights that are served; 0 is the model folder's."""
        return self._version

    @property
    def sync_state(self) -> SyncState:
        return self._sync_state

    @property
    def contents(self) -> object | None:
        """Another one whenever the weights are overwritten; None when there are none."""
        return None if self._residency.states["weights"] is State.EMPTY else self._contents

    def receiving_group(self) -> WorkerGroup:
        """The workers that take new weights; raises StateError when theirs are not on the device."""
        self._require("weights", "sync_weights()", may_be_empty=True)
        return self._built_group()

    @contextlib.contextmanager
    def receiving(self, *, is_staged: bool) -> Iterator[None]:
        """A weight sync: nothing is generated meanwhile, unless the old weights stay whole until its end."""
        if self._sync_state is SyncState.SERVING and not is_staged:
            self._sync_state = SyncState.PAUSED
        try:
            yield
        finally:
            if self._sync_state is SyncState.PAUSED:
                self._sync_state = SyncState.SERVING

    def poison(self) -> None:
        """The weights are about to be overwritten: until ``commit`` the engine refuses to generate."""
        self._sync_state, self._contents = SyncState.POISONED, object()

    def commit(self, version: int) -> None:
        """The weights are whole, and of this version."""
        self._version, self._sync_state = version, SyncState.SERVING
        self._residency.set("weights", State.LOADED)

    @takes("load()", path=optional(PATH))
    def load(self, path: str | Path | None = None) -> None:
        """Read the weights from the model folder again, or from another one of the same model.

        Raises:
            StateError: the weights are not on the device.
            CheckpointError, SyncError: the folder is damaged or of another model; nothing is changed then.
        """
        self.receiving_group()
        self._call(InferenceExecutor.read_weights, Path(path or self._path))
        version = 0 if path is None else self._version + 1
        with poisoned([self], version):
            self._call(InferenceExecutor.take_weights, version=version)

    def _planned(self, move: Move, tags: tuple[str, ...]) -> dict[str, State]:
        if move is Move.ONLOAD and "kv_cache" in (tags or self.tags):
            self._require_serving("taking the KV cache back")
        return super()._planned(move, tags)

    def _require_serving(self, purpose: str) -> None:
        if self._sync_state is SyncState.PAUSED:
            raise StateError(f"{purpose} is refused while a weight sync is under way; wait for its end")
        if self._sync_state is SyncState.POISONED:
            raise StateError(
                f"{purpose} is refused: a weight sync stopped midway and the weights are a mixture; "
                "call sync_weights() again, or load()"
            )


def _num_completions(num_prompts: int, params: ParamsLike | Sequence[ParamsLike]) -> int:
    if isinstance(params, Sequence):
        return sum(SamplingParams.of(one).n for one in params)
    return num_prompts * SamplingParams.of(params).n
