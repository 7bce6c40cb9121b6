"""Request queues: what is submitted waits, runs, and is collected; between two steps it can be paused or cancelled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
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


class PausableQueue(ABC):
    """Keeps requests until they are collected. How they run is a subclass's."""

    def __init__(self) -> None:
        self._done: dict[int, RequestOutput] = {}
        """The requests that have ended and are not collected yet, by number."""
        self._is_paused = False

    @property
    @abstractmethod
    def _unfinished(self) -> Collection[int]:
        """The numbers of the requests that have not ended."""

    @abstractmethod
    def _cancel(self, numbers: Collection[int]) -> None:
        """Drop these unfinished requests."""

    @abstractmethod
    def _finish(self, version: int) -> None:
        """Run all requests to their end."""

    def abort(self, numbers: Sequence[int] | None) -> int:
        """Cancel these requests, or all for None; return how many had not ended."""
        chosen = set(self._unfinished) if numbers is None else set(numbers).intersection(self._unfinished)
        self._cancel(chosen)
        for number in list(self._done) if numbers is None else numbers:
            self._done.pop(number, None)
        return len(chosen)

    def pause(self, mode: PauseMode, version: int) -> None:
        """Make no further step; "abort" cancels all requests, "wait" finishes them first."""
        check_pause_mode(mode)
        if mode == "abort":
            self.abort(None)
        elif mode == "wait":
            self._finish(version)
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def _collected(self) -> dict[int, RequestOutput]:
        done, self._done = self._done, {}
        return done


class RequestQueue(PausableQueue):
    """The queue of an executor that generates only while it is called: ``run(prompts, params, version)``."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._waiting: dict[int, tuple[Prompt, SamplingParams]] = {}

    def submit(self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        self._waiting |= dict(zip(numbers, zip(prompts, params, strict=True), strict=True))

    def collect(self, version: int) -> dict[int, RequestOutput]:
        """Run the waiting requests, unless paused; return the outputs of all that have ended, by number."""
        if not self._is_paused:
            self._finish(version)
        return self._collected()

    @property
    def _unfinished(self) -> Collection[int]:
        return self._waiting

    def _cancel(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self._waiting[number]

    def _finish(self, version: int) -> None:
        waiting = dict(self._waiting)
        if waiting:
            prompts, params = zip(*waiting.values(), strict=True)
            self._done |= zip(waiting, self._run(prompts, params, version), strict=True)
            self._waiting.clear()
