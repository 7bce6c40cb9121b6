"""The requests of an inference engine: each goes to the replica that has least to do, and comes back by its number."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlcore.engines.executors.base import InferenceExecutor
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import MultimodalPrompt, Prompt, inputs_of
from rlcore.engines.sampling.request_queue import PauseMode
from rlcore.errors import RlcoreError, StateError

P = ParamSpec("P")
R = TypeVar("R")
_POLL_S = 0.05
"""The longest wait for one replica while another may have something, where it cannot be told to end early."""
_Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


class RequestRouter:
    """Spreads requests over the replicas of one engine, from the start of its workers to their end."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.placed: dict[int, tuple[int, int]] = {}
        """Number of each request under way -> rank of its replica, and its cost."""
        self._collected: dict[int, RequestOutput] = {}
        """Outputs that the replicas gave while somebody waited for something else."""
        self._prompts: dict[int, Prompt] = {}
        """Prompts of the requests under way that have more than the replicas send back: texts sent as token ids, and
        images."""
        self._next_number = 0
        self._is_paused = False

    # -------------------------------------------------------------------------------------------- generate

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        version: int,
        advance: Callable[[int], None],
    ) -> list[RequestOutput]:
        """Complete these prompts; return the outputs in their order.

        Args:
            advance: called with the number of completions that have ended since its last call.
        """
        # A single replica reads all prompts before it begins, and needs no check beforehand.
        sent = self._tokenized(prompts, params) if len(self._group.workers) > 1 else prompts
        by_rank = self._by_rank([_cost(*one) for one in zip(sent, params, strict=True)])
        calls: _Calls = [
            (([sent[index] for index in own], [params[index] for index in own]), {"version": version})
            for own in by_rank
        ]
        found: dict[int, RequestOutput] = {}
        each = self._group.call(InferenceExecutor.generate.__name__, calls, advance)
        for own, outputs in zip(by_rank, each, strict=True):
            found |= zip(own, outputs, strict=True)
        kept = _kept(range(len(prompts)), prompts, sent)
        return [_completed(found[index], kept.get(index)) for index in range(len(prompts))]

    def _tokenized(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Prompt]:
        """Let each replica check a part of the prompts before any begins, and give their token ids.

        A request that is refused then costs nothing, and no text is tokenised again where it is completed.
        """
        size = len(self._group.workers)
        calls: _Calls = [
            ((prompts[rank::size], params[rank::size]), {"numbers": range(rank, len(prompts), size)})
            for rank in range(size)
        ]
        found = list(prompts)
        for rank, token_ids in enumerate(self._group.call(InferenceExecutor.check_prompts.__name__, calls)):
            if token_ids is not None:
                found[rank::size] = token_ids
        # what a prompt has beside its tokens is sent with them
        return [own if isinstance(own, MultimodalPrompt) else ids for own, ids in zip(prompts, found, strict=True)]

    def _by_rank(self, costs: Sequence[int]) -> list[list[int]]:
        """Return for each replica the indices of the requests that it gets."""
        loads = [0] * len(self._group.workers)
        for rank, cost in self.placed.values():
            loads[rank] += cost
        ranks = spread(costs, loads)
        return [[index for index, at in enumerate(ranks) if at == rank] for rank in range(len(loads))]

    # ------------------------------------------------------------------------------- submit and collect

    def submit(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int, max_in_flight: int
    ) -> list[int]:
        """Begin to complete these prompts; return their numbers. After an error none of them is under way.

        Args:
            max_in_flight: the most requests under way; others wait here until earlier ones have ended.

        Raises:
            StateError: requests have to wait while the engine is paused.
        """
        sent = self._tokenized(prompts, params)
        numbers = list(range(self._next_number, self._next_number + len(prompts)))
        self._next_number += len(prompts)
        self._prompts |= _kept(numbers, prompts, sent)
        waiting = list(zip(numbers, sent, params, strict=True))
        with self.aborting_on_error(numbers):
            while waiting:
                while (room := max_in_flight - len(self.placed)) < 1:
                    if self._is_paused:
                        raise StateError(
                            f"submit() needs room for {len(waiting)} prompts, and the engine is paused; resume()"
                        )
                    self.put_back(self._gather(math.inf, version))
                now, waiting = waiting[:room], waiting[room:]
                self._send(now, version)
        return numbers

    def _send(self, requests: Sequence[tuple[int, Prompt, SamplingParams]], version: int) -> None:
        costs = [_cost(prompt, params) for _, prompt, params in requests]
        by_rank = self._by_rank(costs)
        calls: _Calls = []
        for own in by_rank:
            numbers, prompts, params = ([requests[index][part] for index in own] for part in range(3))
            calls.append(((numbers, prompts, params), {"version": version}))
        self._group.call(InferenceExecutor.submit.__name__, calls)
        for rank, own in enumerate(by_rank):
            self.placed |= {requests[index][0]: (rank, costs[index]) for index in own}

    def collect(self, timeout_s: float | None, *, version: int) -> dict[int, RequestOutput]:
        """Return what has ended since the last call, by number; wait up to ``timeout_s`` for the first, None: any time.

        Raises:
            StateError: the engine is paused, and nothing would ever end.
        """
        if self._is_paused and timeout_s is None and self.placed and not self._collected:
            raise StateError("collect() would wait for ever while the engine is paused; call resume()")
        found, self._collected = self._collected, {}
        wait_s = 0.0 if found else math.inf if timeout_s is None else timeout_s
        return found | self._gather(wait_s, version)

    def put_back(self, outputs: Mapping[int, RequestOutput]) -> None:
        """Keep outputs for the next ``collect``."""
        self._collected |= outputs

    def _gather(self, wait_s: float, version: int) -> dict[int, RequestOutput]:
        """Return what has ended on any replica; wait for the first."""
        deadline = time.monotonic() + wait_s
        while self.placed:
            poll_s = 1.0 if len(self._group.workers) == 1 else _POLL_S
            left_s = min(poll_s, max(0.0, deadline - time.monotonic()))
            calls: _Calls = [((left_s,), {"version": version})] * len(self._group.workers)
            each = self._group.call(InferenceExecutor.collect.__name__, calls, is_enough=bool)
            found = {
                number: _completed(output, self._prompts.pop(number, None))
                for own in each
                for number, output in own.items()
            }
            for number in found:
                self.placed.pop(number, None)
            if found or time.monotonic() >= deadline:
                return found
        return {}

    # ------------------------------------------------------------------------- abort, pause and resume

    def abort(self, numbers: Sequence[int] | None) -> int:
        """Cancel these requests, or all for None; return how many were unfinished. None of them is collected."""
        num_aborted = sum(self._call(InferenceExecutor.abort, numbers if numbers is None else list(numbers)))
        self._forget(list(self.placed) if numbers is None else numbers)
        return num_aborted

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for known in (self.placed, self._collected, self._prompts):
                known.pop(number, None)

    @contextlib.contextmanager
    def aborting_on_error(self, numbers: Iterable[int]) -> Iterator[None]:
        """Inside, an error cancels these requests; ``numbers`` may change meanwhile."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RlcoreError):  # the replicas may have ended
                self.abort(list(numbers))
            raise

    def pause(self, mode: PauseMode, *, version: int) -> None:
        """Let the replicas make no further step; see ``InferenceExecutor.pause``."""
        self._call(InferenceExecutor.pause, mode, version=version)
        self._is_paused = True
        if mode == "abort":
            self._forget([*self.placed, *self._collected])

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._call(InferenceExecutor.resume)
        self._is_paused = False

    def _call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._group.call(method.__name__, [(args, kwargs)] * len(self._group.workers))


def spread(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return a replica for each request: the costliest request first, each to the replica that has least to do.

    Args:
        costs: of each request, in tokens.
        loads: the cost of what each replica has under way.
    """
    own = list(loads)
    ranks = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        ranks[index] = own.index(min(own))
        own[ranks[index]] += costs[index]
    return ranks


def _cost(prompt: Prompt, params: SamplingParams) -> int:
    """Return the tokens of a request at most; a text has about one in four characters."""
    length = len(prompt) // 4 if isinstance(prompt, str) else len(prompt)
    return length + params.n * params.max_tokens


def _kept(numbers: Iterable[int], prompts: Sequence[Prompt], sent: Sequence[Prompt]) -> dict[int, Prompt]:
    """Return the prompts of which a replica does not send everything back."""
    each = zip(numbers, prompts, sent, strict=True)
    return {
        number: prompt
        for number, prompt, as_sent in each
        if isinstance(prompt, MultimodalPrompt) or (isinstance(prompt, str) and prompt is not as_sent)
    }


def _completed(output: RequestOutput, prompt: Prompt | None) -> RequestOutput:
    """Return an output with what its prompt had besides token ids."""
    if isinstance(prompt, str):
        return replace(output, prompt=prompt)
    return output if prompt is None else replace(output, inputs=inputs_of(prompt))
