"""Requests that run while the program does something else: submit, collect, abort, pause and resume."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rlcore.arguments import AT_LEAST_0, LIST, Kind, optional, takes
from rlcore.engines.executors.base import InferenceExecutor
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import ParamsLike, Prompt, params_of_each, prompts_of
from rlcore.engines.sampling.request_queue import PauseMode, check_pause_mode
from rlcore.errors import InvalidInputError, RlcoreError, StateError

P = ParamSpec("P")
R = TypeVar("R")
_POLL_S = 0.05
"""How long one replica is waited for while another may have something."""
Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(slots=True)
class Serving:
    """What an engine has under way, and on which replica."""

    placed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Request -> rank and cost."""
    collected: dict[int, RequestOutput] = field(default_factory=dict)
    """Brought from the replicas while somebody waited for room."""
    next_number: int = 0
    is_paused: bool = False

    def loads(self, num_replicas: int) -> list[int]:
        """Cost of what each replica has under way."""
        loads = [0] * num_replicas
        for rank, cost in self.placed.values():
            loads[rank] += cost
        return loads


class _Engine(Protocol):
    _serving: Serving

    @property
    def version(self) -> int: ...
    def submit(self, prompts: Any, sampling_params: Any = None, *, max_in_flight: int = 1024) -> list[int]: ...
    def collect(self, timeout_s: float | None = None) -> dict[int, RequestOutput]: ...
    def abort(self, numbers: Sequence[int] | None = None) -> int: ...
    def _require_ready(self, purpose: str) -> None: ...
    def _built_group(self) -> WorkerGroup: ...
    def _call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...


class AsynchronousRequests:
    """Of an inference engine; another way to say ``generate``."""

    def submit(
        self: _Engine,
        prompts: str | Sequence[Prompt],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        max_in_flight: int = 1024,
    ) -> list[int]:
        """Begin to complete these prompts, each on the replica that has least to do; returns their numbers.

        Args:
            max_in_flight: prompts that may be unfinished; more wait here until others have ended.

        Raises:
            StateError: as ``generate``; or room has to be waited for while the engine is paused.
            InvalidInputError: as ``generate``.

        After an error none of these prompts is under way.
        """
        if type(max_in_flight) is not int or max_in_flight < 1:
            raise InvalidInputError(f"max_in_flight must be a whole number of at least 1, got {max_in_flight!r}")
        self._require_ready("submit()")
        texts = prompts_of(prompts)
        each = params_of_each(texts, sampling_params)
        check_prompts(self._built_group(), texts, each)
        numbers = list(range(self._serving.next_number, self._serving.next_number + len(texts)))
        self._serving.next_number += len(texts)
        rest = list(zip(numbers, texts, each, strict=True))
        with _aborted_by_errors(self, numbers):
            while rest:
                while (room := max_in_flight - len(self._serving.placed)) < 1:
                    if self._serving.is_paused:
                        raise StateError(
                            f"submit() needs room for {len(rest)} prompts, and the engine is paused; resume()"
                        )
                    self._serving.collected |= _gathered(self, math.inf)
                now, rest = rest[:room], rest[room:]
                _send(self, now)
        return numbers

    @takes("collect()", timeout_s=optional(AT_LEAST_0))
    def collect(self: _Engine, timeout_s: float | None = None) -> dict[int, RequestOutput]:
        """What has ended since the last time, by the numbers of ``submit`` in the order in which it ended.

        Waits for the first to end, if any is under way, but not longer than ``timeout_s``.

        Raises:
            StateError: the engine is paused and nothing would ever come, without a ``timeout_s``.
        """
        if self._serving.is_paused and timeout_s is None and self._serving.placed and not self._serving.collected:
            raise StateError("collect() would wait for ever while the engine is paused; call resume()")
        found, self._serving.collected = self._serving.collected, {}
        wait_s = 0.0 if found else math.inf if timeout_s is None else timeout_s
        return found | _gathered(self, wait_s)

    def generate_turns(
        self: _Engine,
        prompts: Sequence[Prompt],
        next_prompt: Callable[[int, list[RequestOutput]], Prompt | None],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
    ) -> list[list[RequestOutput]]:
        """Conversations: complete each prompt, then what is said to be next, until that is None.

        Args:
            next_prompt: called with the prompt's index and its outputs so far, as soon as each has ended.
            sampling_params: for all turns of all prompts, or one for each prompt.

        Returns:
            For each prompt its outputs, turn by turn.
        """
        prompts = prompts_of(prompts)
        each = params_of_each(prompts, sampling_params)
        turns: list[list[RequestOutput]] = [[] for _ in prompts]
        others: dict[int, RequestOutput] = {}
        under_way = dict(zip(self.submit(prompts, each), range(len(prompts)), strict=True))
        try:
            with _aborted_by_errors(self, under_way):
                while under_way:
                    found = self.collect()
                    others |= {number: output for number, output in found.items() if number not in under_way}
                    for number in [number for number in found if number in under_way]:
                        index = under_way.pop(number)
                        turns[index].append(found[number])
                        if (prompt := next_prompt(index, turns[index])) is not None:
                            under_way[self.submit([prompt], [each[index]])[0]] = index
        finally:
            self._serving.collected |= others  # the program's own, of ``submit``
        return turns

    @takes("abort()", numbers=optional(Kind("a list of numbers that submit() gave", LIST.has)))
    def abort(self: _Engine, numbers: Sequence[int] | None = None) -> int:
        """Give up these requests, all of them for None; returns how many were unfinished. They are not collected."""
        self._built_group()
        num_aborted: int = sum(self._call(InferenceExecutor.abort, numbers if numbers is None else list(numbers)))
        for number in list(self._serving.placed) if numbers is None else numbers:
            self._serving.placed.pop(number, None)
            self._serving.collected.pop(number, None)
        return num_aborted

    def pause(self: _Engine, mode: PauseMode = "abort") -> None:
        """Let the replicas make no more tokens.

        Args:
            mode: "abort" gives up what is under way, "wait" finishes it first, "keep" leaves it as it is: with the
                next weights it goes on, and its completions say which tokens came before (``version_spans``).
        """
        check_pause_mode(mode)
        self._call(InferenceExecutor.pause, mode, version=self.version)
        self._serving.is_paused = True
        if mode == "abort":
            self._serving.placed.clear()
            self._serving.collected.clear()

    def resume(self: _Engine) -> None:
        """Go on after ``pause``; nothing if it is not paused."""
        self._call(InferenceExecutor.resume)
        self._serving.is_paused = False


@contextlib.contextmanager
def _aborted_by_errors(engine: _Engine, numbers: Iterable[int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(RlcoreError):  # the replicas may have ended
            engine.abort(list(numbers))
        raise


def check_prompts(group: WorkerGroup, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """Let each replica read a part of them, before any begins: one that is refused costs nothing."""
    size = len(group.workers)
    calls: Calls = [
        ((prompts[rank::size], params[rank::size]), {"numbers": range(rank, len(prompts), size)})
        for rank in range(size)
    ]
    group.call(InferenceExecutor.check_prompts.__name__, calls)


def spread(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """A replica for each request: the costliest first, each to the one that has least to do.

    Args:
        costs: of each request, in tokens.
        loads: what each replica has to do already.
    """
    own = list(loads)
    ranks = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        ranks[index] = own.index(min(own))
        own[ranks[index]] += costs[index]
    return ranks


def cost_of(prompt: Prompt, params: SamplingParams) -> int:
    """In tokens, of which a text has about one in four characters."""
    length = len(prompt) // 4 if isinstance(prompt, str) else len(prompt)
    return length + params.n * params.max_tokens


def _send(engine: _Engine, requests: Sequence[tuple[int, Prompt, SamplingParams]]) -> None:
    group = engine._built_group()
    costs = [cost_of(prompt, params) for _, prompt, params in requests]
    ranks = spread(costs, engine._serving.loads(len(group.workers)))
    calls: Calls = []
    for rank in range(len(group.workers)):
        own = [request for request, at in zip(requests, ranks, strict=True) if at == rank]
        numbers, prompts, params = ([one[part] for one in own] for part in range(3))
        calls.append(((numbers, prompts, params), {"version": engine.version}))
    group.call(InferenceExecutor.submit.__name__, calls)
    for (number, _, _), rank, cost in zip(requests, ranks, costs, strict=True):
        engine._serving.placed[number] = (rank, cost)


def _gathered(engine: _Engine, wait_s: float) -> dict[int, RequestOutput]:
    """What has ended on any replica; waits for the first."""
    deadline = time.monotonic() + wait_s
    serving, num_replicas = engine._serving, len(engine._built_group().workers)
    while serving.placed:
        left_s = min(1.0 if num_replicas == 1 else _POLL_S, max(0.0, deadline - time.monotonic()))
        each = engine._call(InferenceExecutor.collect, left_s, version=engine.version)
        found = {number: output for own in each for number, output in own.items()}
        for number in found:
            serving.placed.pop(number, None)
        if found or time.monotonic() >= deadline:
            return found
    return {}
