"""The request queue of an executor that generates only while it is called: requests run when they are collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt
from rlcore.errors import InvalidInputError

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = ("abort", "wait", "keep")
Run = Callable[[Sequence[Any], Sequence[SamplingParams], int], list[RequestOutput]]


def check_pause_mode(mode: str) -> None:
    if mode not in PAUSE_MODES:
        raise InvalidInputError(f"pause() takes one of {', '.join(PAUSE_MODES)}, got {mode!r}")


class RequestQueue:
    """Keeps requests until they are collected; ``run(prompts, params, version)`` completes them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: dict[int, tuple[Prompt, SamplingParams]] = {}
        self._done: dict[int, RequestOutput] = {}
        self._is_paused = False

    def submit(self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        self._waiting |= dict(zip(numbers, zip(prompts, params, strict=True), strict=True))

    def collect(self, version: int) -> dict[int, RequestOutput]:
        """Run the waiting requests, unless paused; return the outputs of all that have ended, by number."""
        if not self._is_paused:
            self._finish(version)
        done, self._done = self._done, {}
        return done

    def abort(self, numbers: Sequence[int] | None) -> int:
        chosen = [number for number in self._waiting if numbers is None or number in numbers]
        for number in chosen:
            del self._waiting[number]
        for number in list(self._done) if numbers is None else numbers:
            self._done.pop(number, None)
        return len(chosen)

    def pause(self, mode: PauseMode, version: int) -> None:
        check_pause_mode(mode)
        if mode == "abort":
            self.abort(None)
        elif mode == "wait":
            self._finish(version)
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def _finish(self, version: int) -> None:
        waiting = dict(self._waiting)
        if waiting:
            prompts, params = zip(*waiting.values(), strict=True)
            self._done |= zip(waiting, self._run(prompts, params, version), strict=True)
            self._waiting.clear()
