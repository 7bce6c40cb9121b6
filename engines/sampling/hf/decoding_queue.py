"""The requests of the executor ``hf``, decoded a token at a time while they are collected.

Between two steps anything may happen: requests are added or cancelled, weights replaced. What is under way keeps its
cache and goes on with the weights that are there then; each token's version is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlcore.engines.sampling.completion import Completion, RequestOutput
from rlcore.engines.sampling.hf.decoding import BatchDecoder, Decoded
from rlcore.engines.sampling.hf.schedule import SampleRequest
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt, as_key
from rlcore.engines.sampling.request_queue import PausableQueue
from rlcore.engines.sampling.seeds import sample_keys, seeds_of_each

_MOST_BATCHES = 4
"""Batches that are decoded by turns. What comes later waits for one to end, and is then one batch: a step of a larger
batch takes hardly longer. Several, so that one long completion does not keep all others waiting."""


@dataclass(slots=True)
class _UnfinishedRequest:
    """A request of which some sample has not ended."""

    prompt: str | None
    token_ids: list[int]
    num_samples: int
    completions: dict[int, Completion] = field(default_factory=dict)
    """The completions of the samples that have ended, by sample index."""


@dataclass(slots=True)
class _RunningBatch:
    """Samples that are decoded together; ``request`` of each is the number of its request."""

    samples: list[SampleRequest]
    decoder: BatchDecoder

    @property
    def num_tokens(self) -> int:
        """The most that its cache will hold."""
        longest = max(len(one.prompt) for one in self.samples) + max(one.params.max_tokens for one in self.samples)
        return len(self.samples) * longest


class DecodingQueue(PausableQueue):
    """Makes a token of what runs at each step.

    Args:
        read: returns the token ids of prompts; raises for those that it refuses.
        decoder: makes the decoder of a batch.
        limits: returns how many rows and how many cached tokens fit, when nothing is cached.
        completion: makes the completion of a sample that has ended.
    """

    def __init__(
        self,
        *,
        read: Callable[[Sequence[Prompt], Sequence[SamplingParams], Sequence[int]], list[Sequence[int]]],
        decoder: Callable[[Sequence[SampleRequest]], BatchDecoder],
        limits: Callable[[], tuple[int, int]],
        completion: Callable[[Decoded], Completion],
    ) -> None:
        super().__init__()
        self._read, self._decoder, self._limits, self._completion = read, decoder, limits, completion
        self._requests: dict[int, _UnfinishedRequest] = {}
        self._waiting: list[SampleRequest] = []
        self._running: list[_RunningBatch] = []
        self._fits = 0, 0

    def submit(self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """Take requests; none of them after an error."""
        read = self._read(prompts, params, numbers)
        for number, prompt, token_ids, one, seed in zip(
            numbers, prompts, read, params, seeds_of_each(params), strict=True
        ):
            self._requests[number] = _UnfinishedRequest(
                prompt if isinstance(prompt, str) else None, list(token_ids), one.n
            )
            self._waiting += [
                SampleRequest(number, index, as_key(token_ids), one, key)
                for index, key in enumerate(sample_keys(token_ids, seed=seed, n=one.n))
            ]

    def collect(self, timeout_s: float, version: int) -> dict[int, RequestOutput]:
        """Decode until a request has ended or ``timeout_s`` is over, a step at least; return those that have ended."""
        deadline = time.monotonic() + timeout_s
        if self._is_paused and self._requests and not self._done:
            time.sleep(timeout_s)  # whoever asks again and again does not keep the host busy
        while self._requests and not self._done and not self._is_paused:
            self._step(version)
            if time.monotonic() >= deadline:
                break
        return self._collected()

    @property
    def _unfinished(self) -> Collection[int]:
        return self._requests

    def _cancel(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self._requests[number]
        self._waiting = [one for one in self._waiting if one.request not in numbers]
        for running in self._running:
            running.decoder.drop([at for at, one in enumerate(running.samples) if one.request in numbers])
        self._running = [running for running in self._running if not running.decoder.is_done]

    def _finish(self, version: int) -> None:
        while self._requests:
            self._step(version)

    def drop_caches(self) -> None:
        """Free all caches: completions that have not ended begin anew."""
        begun = [one for running in self._running for one in running.samples if one.request in self._requests]
        self._running = []
        self._waiting = [
            one for one in begun if one.index not in self._requests[one.request].completions
        ] + self._waiting

    def _step(self, version: int) -> None:
        """Begin what fits, and make one token of all that runs."""
        self._begin()
        try:
            for running in self._running:
                for at, decoded in running.decoder.step(version):
                    self._take(running.samples[at], self._completion(decoded))
        except BaseException:
            self.drop_caches()  # a decoder that failed in the middle of a step cannot go on
            raise
        self._running = [running for running in self._running if not running.decoder.is_done]

    def _begin(self) -> None:
        if not self._waiting or len(self._running) >= _MOST_BATCHES:
            return
        if not self._running:
            self._fits = self._limits()
        rows = self._fits[0] - sum(len(one.samples) for one in self._running)
        tokens = self._fits[1] - sum(one.num_tokens for one in self._running)
        if samples := self._oldest_that_fit(rows, tokens):
            self._running.append(_RunningBatch(samples, self._decoder(samples)))
            del self._waiting[: len(samples)]

    def _oldest_that_fit(self, rows: int, tokens: int) -> list[SampleRequest]:
        """Return the samples that have waited longest and fit together; one that never fits, when nothing else runs."""
        longest_prompt = longest_completion = 0
        for count, sample in enumerate(self._waiting):
            longest_prompt = max(longest_prompt, len(sample.prompt))
            longest_completion = max(longest_completion, sample.params.max_tokens)
            if count >= rows or (count + 1) * (longest_prompt + longest_completion) > tokens:
                return self._waiting[: count or (not self._running)]
        return list(self._waiting)

    def _take(self, sample: SampleRequest, completion: Completion) -> None:
        request = self._requests[sample.request]
        request.completions[sample.index] = completion
        if len(request.completions) == request.num_samples:
            del self._requests[sample.request]
            ordered = [request.completions[index] for index in range(request.num_samples)]
            self._done[sample.request] = RequestOutput(request.prompt, request.token_ids, ordered)
