"""One SGLang engine at work: requests go in, completions come out, and rlcore decides when steps may be made.

SGLang makes steps in its scheduler processes for as long as there are requests. Before the weights change the
schedulers are paused; a completion tells the version that made each token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt, PromptReader
from rlcore.engines.sampling.replica.calls import results_of
from rlcore.engines.sampling.replica.jobs import LOOK_S, PAUSED, Jobs, RunningSample, require_running
from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses
from rlcore.engines.sampling.request_queue import PauseMode, check_pause_mode
from rlcore.engines.sampling.seeds import sample_keys
from rlcore.engines.sampling.sglang import versions
from rlcore.engines.sampling.sglang.engine_thread import EngineThread
from rlcore.engines.sampling.sglang.interfaces import SglangEngine, SglangTokenizerManager
from rlcore.engines.sampling.sglang.sampling import request_params
from rlcore.engines.sampling.sglang.shard import SglangShard
from rlcore.engines.sampling.sglang.shard_calls import ShardCalls
from rlcore.errors import RlcoreError, StateError

_LOOK_AGAIN_S = 0.2


class SglangReplica:
    """Runs the requests of one SGLang engine. Its methods are called by one thread.

    Args:
        seed: of the random numbers of requests that have no seed.
    """

    def __init__(
        self, engine: EngineThread, calls: ShardCalls, processes: WorkerProcesses, reader: PromptReader, seed: int
    ) -> None:
        self._thread = engine
        made: SglangEngine = engine.engine
        self._manager: SglangTokenizerManager = made.tokenizer_manager
        self._calls = calls
        self._processes = processes
        self._context = processes.context
        self._reader = reader
        self._seeds = torch.Generator().manual_seed(seed)
        self._jobs = Jobs(reader)
        self.num_routed_layers = 0
        """The layers for which completions have the experts of their tokens."""
        self._ended_in: dict[str, int] = {}
        """The version that made the last tokens of samples which ended before the weights changed."""
        self._version = 0
        self._lengths: dict[str, int] = {}
        """The tokens of each sample that was under way when the schedulers were paused last."""
        self._held: set[str] = set()
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        """Guards whatever the engine's thread changes too."""
        self._num_ended = 0
        """The samples of the jobs of run() that have ended and are not told yet."""

    @property
    def version(self) -> int:
        return self._version

    # ------------------------------------------------------------------------------------------- the shards

    def call_each(self, method: str, calls: Sequence[tuple[Any, ...]], purpose: str = "") -> list[Any]:
        """Call a method of each shard with the arguments of each; no step is made meanwhile.

        Raises:
            WorkerDiedError: a process of SGLang has ended.
        """
        purpose = purpose or method
        with self._processes.needed_for(purpose), self._schedulers_waiting(purpose):
            return results_of(self._calls.answers(method, calls), self._context, purpose)

    @contextlib.contextmanager
    def _schedulers_waiting(self, purpose: str) -> Iterator[None]:
        if self._calls.are_open:
            yield
            return
        self._calls.open(purpose)
        try:
            yield
        finally:
            self._calls.close()

    def stay(self) -> None:
        """Keep the schedulers waiting for calls, until ``leave``: many are to come."""
        if not self._calls.are_open:
            with self._processes.needed_for("a weight sync"):
                self._calls.open("a weight sync")

    def leave(self) -> None:
        self._calls.close()

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of all shards; return the result of the first."""
        return self.call_each(method.__name__, [args] * len(self._context.devices))[0]

    # --------------------------------------------------------------------------------------------- requests

    def run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], version: int, advance: Callable[[int], None]
    ) -> list[RequestOutput]:
        require_running(self._held, "generate()")
        self._set_version(version)
        with self._jobs.waited_for(len(prompts)) as numbers:
            try:
                self._add(numbers, prompts, params)
                while not self._jobs.are_done(numbers):
                    if self._context.is_cancelled():
                        raise StateError("generate() has ended early: nobody waits for it any more")
                    self._wait_for(lambda: bool(self._num_ended), _LOOK_AGAIN_S, "generate")
                    with self._changed:
                        num_ended, self._num_ended = self._num_ended, 0
                    if num_ended:
                        advance(num_ended)
                return [job.output() for job in self._jobs.take(numbers)]
            except BaseException:
                self._drop(numbers)
                raise
            finally:
                self._num_ended = 0

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], version: int
    ) -> None:
        self._processes.require("submit")
        self._require_sound()
        self._set_version(version)
        self._add(numbers, prompts, params)

    def collect(self, timeout_s: float) -> dict[int, RequestOutput]:
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            self._wait_for(self._may_collect, min(left_s, LOOK_S), "collect")
            with self._changed:
                if self._may_collect() or not left_s or self._context.is_cancelled():
                    done = self._jobs.collect()
                    break
        return {number: job.output() for number, job in done.items()}  # SGLang's thread goes on meanwhile

    def _may_collect(self) -> bool:
        return bool(self._jobs.ready() or not self._jobs.samples or self._held)

    def progress(self) -> dict[int, int]:
        lengths = self._call(SglangShard.progress)
        with self._changed:
            return self._jobs.progress(lengths)

    def abort(self, numbers: Sequence[int] | None) -> int:
        with self._changed:
            chosen = self._jobs.submitted(numbers)
            self._drop(chosen)
            self._jobs.forget_outputs(numbers)
            return len(chosen)

    def pause(self, mode: PauseMode) -> None:
        check_pause_mode(mode)
        if mode == "abort":
            self.abort(None)
        while mode == "wait" and self._jobs.samples and not self._held:
            self._wait_for(lambda: not self._jobs.samples, _LOOK_AGAIN_S, "pause")
        self._hold(PAUSED, keeps_cache=mode == "keep")

    def resume(self) -> None:
        self.release(PAUSED)

    def hold(self, reason: str) -> None:
        self._hold(reason, keeps_cache=False)

    def _hold(self, reason: str, *, keeps_cache: bool) -> None:
        if not self._held or not keeps_cache:  # a pause that keeps caches may become one that does not
            self._call(SglangShard.pause, keeps_cache)
        if not keeps_cache and not self._calls.are_open:
            self._note_lengths()
        with self._changed:
            self._held.add(reason)
            self._changed.notify_all()

    def _note_lengths(self) -> None:
        """Note which tokens the present weights have made. The schedulers are paused, with no results to come."""
        known = set(self._jobs.samples)
        state = self._thread.begin(self._manager.get_internal_state())
        while True:  # its answer comes after all outputs, and the schedulers then have all requests
            with contextlib.suppress(TimeoutError):
                state.result(_LOOK_AGAIN_S)
                break
            self._processes.require("hold")
        self._lengths = dict(self._call(SglangShard.progress))
        with self._changed:  # what has ended may still be on its way through this process
            self._ended_in |= dict.fromkeys(known & self._jobs.samples.keys() - self._lengths.keys(), self._version)

    def release(self, *reasons: str) -> None:
        was_held = bool(self._held)
        with self._changed:
            self._held.difference_update(reasons)
        if was_held and not self._held:
            self._call(SglangShard.go_on)

    def forget_cached(self) -> None:
        if self._held:  # a hold has taken the caches from running requests
            self._call(SglangShard.flush)
            return
        with self._schedulers_waiting("forget_cached"):
            self._call(SglangShard.pause, False)
            self._call(SglangShard.flush)
            self._call(SglangShard.go_on)

    # -------------------------------------------------------------------------------------- in SGLang's thread

    async def _sample(self, name: str, sample: RunningSample, request: Any) -> None:
        """Run one sample to its end."""
        try:
            # It answers once, at the end.
            output = [one async for one in self._manager.generate_request(request)][-1]
            with self._changed:
                if self._jobs.samples.get(name) is sample:
                    self._take(name, sample, output)
        except Exception as error:  # the next call raises it
            with self._changed:
                if self._jobs.samples.get(name) is sample and not self._processes.is_over:
                    self._failure = error
                    self._drop({sample.job.number})
        finally:
            with self._changed:
                self._changed.notify_all()

    def _take(self, name: str, sample: RunningSample, output: Any) -> None:
        about = output["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise RlcoreError(f"SGLang has ended a request that nobody cancelled: {about['finish_reason']}")
        sample.add(output["output_ids"], [float(logprob) for logprob, *_ in about["output_token_logprobs"]])
        sample.close_span(self._ended_in.pop(name, self._version))
        completion = partial(
            self._reader.completion,
            sample.token_ids,
            sample.logprobs,
            is_stopped=reason == "stop",
            spans=tuple(sample.spans),
            routed_experts=versions.routed_experts(about, self.num_routed_layers) if self.num_routed_layers else None,
        )
        self._jobs.end(name, completion)
        self._num_ended += self._jobs.is_waited_for(sample.job.number)

    # ------------------------------------------------------------------------------------------------ state

    def _add(self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        for job, token_ids, one in self._jobs.read(numbers, prompts, params):
            stops = self._jobs.stop_token_ids(one)
            for index, key in enumerate(self._keys(token_ids, one)):
                name = f"{job.number}-{index}."  # SGLang cancels by the beginning of a name
                sample = RunningSample(job, index)
                with self._changed:
                    self._jobs.samples[name] = sample
                request = versions.generate_request(
                    name, job.token_ids, request_params(one, stops, key), returns_experts=bool(self.num_routed_layers)
                )
                self._thread.begin(self._sample(name, sample, request))

    def _keys(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        if params.seed is not None:
            return sample_keys(token_ids, seed=params.seed, n=params.n)
        drawn: list[int] = torch.randint(-(2**63), 2**63 - 1, (params.n,), generator=self._seeds).tolist()
        return drawn

    def _drop(self, numbers: Collection[int]) -> None:
        with self._changed:
            names = self._jobs.names_of(numbers)
            self._jobs.forget(numbers)
            for name in names:
                self._ended_in.pop(name, None)
                self._thread.call(self._manager.abort_request, name)

    def weights_changed(self, version: int) -> None:
        """Note the version of new weights, and drop what is cached of others. The schedulers are paused."""
        self._set_version(version)
        self.forget_cached()

    def renumber(self, version: int) -> None:
        """Note another version of the same weights: what was computed with them holds."""
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        if version == self._version:
            return
        with self._changed:
            for name in self._jobs.samples.keys() & self._lengths.keys():
                self._jobs.samples[name].close_span(self._version, self._lengths[name])
            self._version = version

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float, method: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._processes.is_lost or condition(), timeout_s)
        self._processes.require(method)
        self._require_sound()

    def _require_sound(self) -> None:
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        if isinstance(failure, RlcoreError):
            raise failure
        raise RlcoreError(f"SGLang failed: {failure}") from failure
