"""``InferenceEngine``: generates with a model folder, and takes new weights from a ``TrainEngine``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rlcore.arguments import AT_LEAST_0, FLAG, LIST, PATH, TEXT, Kind, optional, takes
from rlcore.engines.engine import Engine
from rlcore.engines.executors.base import InferenceExecutor
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.residency import Move, State
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.progress import progress_bar
from rlcore.engines.sampling.prompts import ParamsLike, PromptLike, params_of_each, prompts_of
from rlcore.engines.sampling.request_queue import PauseMode, check_pause_mode
from rlcore.engines.sampling.request_router import RequestRouter
from rlcore.engines.weight_sync.engines import ReceivingEngine, poisoned
from rlcore.errors import InvalidInputError, StateError


class SyncState(StrEnum):
    """The state of the weights in the engine, as weight syncs leave it."""

    SERVING = "serving"
    PAUSED = "paused"
    """A weight sync is under way; the old weights are whole."""
    POISONED = "poisoned"
    """A weight sync stopped midway: the weights are a mixture of two versions."""


class InferenceEngine(Engine, ReceivingEngine):
    """Generates completions.

    Args:
        path: a Hugging Face model folder.
        executor: name of a registered inference executor.
    """

    kind: ClassVar[str] = "inference"
    tags: ClassVar[tuple[str, ...]] = ("weights", "kv_cache")
    takes_all_devices: ClassVar[bool] = True

    @takes("InferenceEngine", path=PATH, executor=TEXT)
    def __init__(self, path: str | Path, *, executor: str = "hf") -> None:
        self._path = Path(path)
        self._version = 0
        self._sync_state = SyncState.SERVING
        self._mark = object()
        self._router: RequestRouter
        super().__init__(executor)

    def _check(self, options: dict[str, Any], python: str | os.PathLike[str] | None) -> None:
        self._executor_class.check(self._path, options, python)

    @property
    def _refill(self) -> str:
        return "sync_weights() into it or load(path)"

    def _build_workers(self, options: dict[str, Any]) -> None:
        self._router = RequestRouter(self._built_group())
        self._call(InferenceExecutor.build, self._path, **options)
        self._version, self._sync_state = 0, SyncState.SERVING
        self._mark = object()

    # -------------------------------------------------------------------------------------------- generate

    @takes("generate()", progress=optional(FLAG))
    def generate(
        self,
        prompts: str | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Sample completions.

        Args:
            prompts: texts; token ids; or, for images, what the model's processor makes of one prompt with
                ``return_tensors="pt"``: a dict of its token ids and, beside them, ``pixel_values`` and the like.
            sampling_params: for all prompts or one for each; a ``SamplingParams`` or a dict of its fields.
            progress: show a progress bar on stderr; None does so on a terminal.

        Returns:
            One output a prompt, in order: ``outputs[i].outputs[j].token_ids``.

        Raises:
            StateError: weights or KV cache are not on the device, or the weights are not whole.
            InvalidInputError: an unknown sampling parameter, one out of range, an empty or too long prompt, images that
                do not fit its tokens.
        """
        self._require_ready("generate()")
        each = prompts_of(prompts)
        params = params_of_each(each, sampling_params)
        with progress_bar("Generating", sum(one.n for one in params), progress) as advance:
            return self._router.generate(each, params, version=self._version, advance=advance)

    def activations(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """Return what each part of the model computes of one sequence, [tokens, width] on the host.

        Names are those of ``rlcore.activations``, such as "embedding" and "layers.3.attention"; of "head", the logits,
        there is the last token alone. Of several replicas the first answers.

        Raises:
            UnsupportedError: the executor cannot look inside its model.
        """
        self._require_ready("activations()")
        prompts_of([token_ids])
        found: dict[str, Tensor] = self._call(InferenceExecutor.activations, list(token_ids))[0]
        return found

    def submit(
        self,
        prompts: str | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        max_in_flight: int = 1024,
    ) -> list[int]:
        """Begin to complete these prompts, each on the replica that has least to do; return their numbers.

        Args:
            prompts: those of ``generate``.
            max_in_flight: the most prompts that may be unfinished; more wait here until others have ended.

        Raises:
            StateError: as ``generate``; or prompts have to wait while the engine is paused.
            InvalidInputError: as ``generate``.

        After an error none of these prompts is under way.
        """
        if type(max_in_flight) is not int or max_in_flight < 1:
            raise InvalidInputError(f"max_in_flight must be a whole number of at least 1, got {max_in_flight!r}")
        self._require_ready("submit()")
        each = prompts_of(prompts)
        params = params_of_each(each, sampling_params)
        return self._router.submit(each, params, version=self._version, max_in_flight=max_in_flight)

    @takes("collect()", timeout_s=optional(AT_LEAST_0))
    def collect(self, timeout_s: float | None = None) -> dict[int, RequestOutput]:
        """Return what has ended since the last call, by the numbers of ``submit``, in the order in which it ended.

        It waits for the first to end, if any is under way, but not longer than ``timeout_s``.

        Raises:
            StateError: the engine is paused and nothing would ever come, without a ``timeout_s``.
        """
        self._built_group()
        return self._router.collect(timeout_s, version=self._version)

    def generate_turns(
        self,
        prompts: Sequence[PromptLike],
        next_prompt: Callable[[int, list[RequestOutput]], PromptLike | None],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
    ) -> list[list[RequestOutput]]:
        """Hold conversations: complete each prompt, then the one that follows it, until that is None.

        Args:
            next_prompt: called with the prompt's index and its outputs so far, as soon as the last of them has ended.
            sampling_params: one for all turns of all prompts, or one for each prompt.

        Returns:
            For each prompt its outputs, turn by turn.
        """
        first = prompts_of(prompts)
        params = params_of_each(first, sampling_params)
        outputs: list[list[RequestOutput]] = [[] for _ in first]
        others: dict[int, RequestOutput] = {}
        under_way = dict(zip(self.submit(first, params), range(len(first)), strict=True))
        try:
            with self._router.aborting_on_error(under_way):
                while under_way:
                    found = self.collect()
                    others |= {number: output for number, output in found.items() if number not in under_way}
                    for number in [number for number in found if number in under_way]:
                        index = under_way.pop(number)
                        outputs[index].append(found[number])
                        if (prompt := next_prompt(index, outputs[index])) is not None:
                            under_way[self.submit([prompt], [params[index]])[0]] = index
        finally:
            self._router.put_back(others)  # of the program's own calls of submit()
        return outputs

    @takes("abort()", numbers=optional(Kind("a list of numbers that submit() gave", LIST.has)))
    def abort(self, numbers: Sequence[int] | None = None) -> int:
        """Cancel these requests, or all for None; return how many were unfinished. They are not collected."""
        self._built_group()
        return self._router.abort(numbers)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Let the replicas make no more tokens.

        Args:
            mode: "abort" cancels what is under way, "wait" finishes it first, "keep" leaves it as it is: it goes on
                with the next weights, and its completions tell which tokens came before (``version_spans``).
        """
        check_pause_mode(mode)
        self._built_group()
        self._router.pause(mode, version=self._version)

    def resume(self) -> None:
        """Go on after ``pause``; without a pause do nothing."""
        self._built_group()
        self._router.resume()

    def _require_ready(self, purpose: str) -> None:
        self._built_group()
        self._require_serving(purpose)
        for tag in self.tags:
            self._require(tag, purpose)

    # ------------------------------------------------------------------------------------------------ sync

    @property
    def path(self) -> Path:
        """The model folder."""
        return self._path

    @property
    def version(self) -> int:
        """Number of the weights that are served; 0 is the model folder's."""
        return self._version

    @property
    def sync_state(self) -> SyncState:
        return self._sync_state

    @property
    def _contents(self) -> object | None:
        """An object that is replaced whenever the weights are overwritten; None while there are none."""
        return None if self._residency.states["weights"] is State.EMPTY else self._mark

    def _receiving_group(self) -> WorkerGroup:
        """Return the workers that take new weights; raise StateError when their weights are not on the device."""
        self._require("weights", "sync_weights()", may_be_empty=True)
        return self._built_group()

    @contextlib.contextmanager
    def _receiving(self, *, is_staged: bool) -> Iterator[None]:
        """Inside, a weight sync is under way: the engine refuses to generate, unless the old weights stay whole."""
        if self._sync_state is SyncState.SERVING and not is_staged:
            self._sync_state = SyncState.PAUSED
        try:
            yield
        finally:
            if self._sync_state is SyncState.PAUSED:
                self._sync_state = SyncState.SERVING

    def _poison(self) -> None:
        """Refuse to generate until ``_commit``: the weights are about to be overwritten."""
        self._sync_state, self._mark = SyncState.POISONED, object()

    def _commit(self, version: int) -> None:
        """Note that the weights are whole, and of this version."""
        self._version, self._sync_state = version, SyncState.SERVING
        self._residency.set("weights", State.LOADED)

    @takes("load()", path=optional(PATH))
    def load(self, path: str | Path | None = None) -> None:
        """Read the weights from the model folder again, or from another one of the same model.

        Raises:
            StateError: the weights are not on the device.
            CheckpointError, SyncError: the folder is damaged or of another model; nothing is changed then.
        """
        self._receiving_group()
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
            self._built_group().check_usable(purpose)  # without workers it takes no weights
            raise StateError(
                f"{purpose} is refused: a weight sync stopped midway and the weights are a mixture; "
                "call sync_weights() again, or load()"
            )
