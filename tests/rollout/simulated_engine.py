"""An engine without a model: requests end after a number of steps that their prompt says, or never."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.engines.sampling.completion import Completion, RequestOutput, VersionSpan
from rlcore.errors import InvalidInputError, StateError


class SimulatedEngine:
    """Has what a controller calls of an ``InferenceEngine``. A token is a step; a request has ``prompt[0]`` of them.

    Only one thread may call it at a time, as is so for a real one: two at once are an error.
    """

    def __init__(self, *, tokens_a_step: int = 1, step_s: float = 0.0, seed: int = 0) -> None:
        self.version = 0
        self.sync_state = "serving"
        self.path = Path("nowhere")
        self.num_restarts = 0
        self.is_broken = False
        self._tokens_a_step, self._step_s = tokens_a_step, step_s
        self._random = random.Random(seed)
        self._requests: dict[int, tuple[list[int], Any, list[int]]] = {}
        """Prompt, parameters, and the version of each token so far."""
        self._next_number = 0
        self._is_paused = False
        self._owner = threading.Lock()
        self.num_aborted = 0

    def submit(self, prompts: Sequence[Any], sampling_params: Sequence[Any], *, max_in_flight: int) -> list[int]:
        with self._alone("submit"):
            if bad := [prompt for prompt in prompts if not prompt]:
                raise InvalidInputError(f"prompt {bad[0]!r} is empty")
            numbers = list(range(self._next_number, self._next_number + len(prompts)))
            self._next_number += len(prompts)
            for number, prompt, params in zip(numbers, prompts, sampling_params, strict=True):
                self._requests[number] = list(prompt), params, []
            return numbers

    def collect(self, timeout_s: float | None = None) -> Mapping[int, RequestOutput]:
        with self._alone("collect"):
            assert timeout_s is not None
            if self._is_paused or not self._requests:
                time.sleep(timeout_s)
                return {}
            time.sleep(self._step_s)
            for prompt, _, made in self._requests.values():
                made.extend([self.version] * min(self._tokens_a_step, prompt[0] - len(made)))
            ended = [number for number, (prompt, _, made) in self._requests.items() if len(made) >= prompt[0]]
            return {number: _output(*self._requests.pop(number)) for number in ended}

    def abort(self, numbers: Sequence[int] | None = None) -> int:
        with self._alone("abort"):
            chosen = [number for number in self._requests if numbers is None or number in numbers]
            for number in chosen:
                del self._requests[number]
            self.num_aborted += len(chosen)
            return len(chosen)

    def pause(self, mode: str = "abort") -> None:
        with self._alone("pause"):
            assert mode == "keep"
            self._is_paused = True

    def resume(self) -> None:
        with self._alone("resume"):
            self._is_paused = False

    def restart(self) -> None:
        self.num_restarts += 1
        self.is_broken, self._requests, self.version, self._is_paused = False, {}, 0, False

    def memory_report(self) -> list[Any]:
        if self.is_broken:
            raise StateError("the engine is dead")
        return []

    @property
    def num_under_way(self) -> int:
        return len(self._requests)

    def _alone(self, method: str) -> threading.Lock:
        if self.is_broken:
            raise StateError(f"{method}() is refused: the engine is dead")
        assert not self._owner.locked(), f"{method}() while another thread uses the engine"
        return self._owner


class SimulatedTrainer:
    """Syncs its version to engines."""

    def __init__(self) -> None:
        self.num_syncs = 0
        self.synced: list[int] = []
        """How many engines each sync was for."""

    def sync_weights(self, engines: Sequence[SimulatedEngine], *, version: int) -> str:
        self.num_syncs += 1
        self.synced.append(len(engines))
        for engine in engines:
            assert engine._is_paused or not engine._requests, "a weight sync while the engine generates"
            engine.version = version
        return f"synced version {version}"


def _output(prompt: list[int], params: Any, versions: list[int]) -> RequestOutput:
    spans: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, at + 1)
        else:
            spans.append(VersionSpan(version, at, at + 1))
    length = len(versions)
    completion = Completion([7] * length, [-0.5] * length, "7" * length, "length", tuple(spans))
    return RequestOutput(None, prompt, [completion] * params.n)
