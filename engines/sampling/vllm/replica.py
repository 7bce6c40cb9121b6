"""One vLLM engine at work: requests go in, completions come out, and rlcore decides when it makes a step.

``run`` makes steps in the calling thread until its own requests have ended. A background thread makes steps for the
requests of ``submit``. Between two steps the weights may change: a completion tells the version that made each token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import MultimodalPrompt, Prompt, PromptReader
from rlcore.engines.sampling.replica.jobs import LOOK_S, PAUSED, Jobs, RunningSample, require_running
from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses
from rlcore.engines.sampling.request_queue import PauseMode, check_pause_mode
from rlcore.engines.sampling.seeds import sample_keys
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmEngine, VllmRequestOutput
from rlcore.errors import InvalidInputError, RlcoreError, StateError, WorkerDiedError


class Replica:
    """Runs the requests of one vLLM engine. Its methods are thread-safe.

    Args:
        activate: makes the engine's device the current one of the calling thread.
    """

    def __init__(
        self, engine: VllmEngine, processes: WorkerProcesses, reader: PromptReader, activate: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._processes = processes
        self._reader = reader
        self._activate = activate
        self._jobs = Jobs(reader)
        self._version = 0
        self._held: set[str] = set()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._news = threading.Event()
        """Set when ``collect`` may have something to say. It waits without the lock: the background thread would have
        that again before who waits for a condition, step after step."""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def between_steps(self, method: str) -> Iterator[None]:
        """Inside, no step is made but by the caller, who may call vLLM on behalf of ``method``.

        Raises:
            WorkerDiedError: a process of vLLM has ended.
            RlcoreError: a step in the background has failed.
        """
        with self._locked(), self._processes.needed_for(method):
            self._require_stepping()
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Inside, the caller has the lock, which the background thread leaves to whoever waits for it."""
        self._num_waiting += 1
        with self._changed:
            self._num_waiting -= 1
            yield
            self._changed.notify_all()

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._version

    # -------------------------------------------------------------------------------------------- requests

    def run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], version: int, advance: Callable[[int], None]
    ) -> list[RequestOutput]:
        """Complete these prompts; ``advance`` is called with the number of completions that ended, as they do.

        Raises:
            StateError: the replica is paused or held; or nobody waits for the call any more.
        """
        with self.between_steps("generate"):
            require_running(self._held, "generate()")
            self._set_version(version)
            with self._jobs.waited_for(len(prompts)) as numbers:
                try:
                    self._add(numbers, prompts, params, is_streamed=False)
                    while not self._jobs.are_done(numbers):
                        if self._processes.context.is_cancelled():
                            raise StateError("generate() has ended early: nobody waits for it any more")
                        if num_ended := self._step(numbers):
                            advance(num_ended)
                    done = self._jobs.take(numbers)
                except BaseException:
                    self._drop(numbers)
                    raise
        return [job.output() for job in done]

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], version: int
    ) -> None:
        """Begin these requests, whose outputs ``collect`` gives by these numbers (>= 0)."""
        with self.between_steps("submit"):
            self._set_version(version)
            try:
                self._add(numbers, prompts, params, is_streamed=True)
            except BaseException:
                self._drop(numbers)
                raise
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_in_background, name="rlcore-vllm", daemon=True)
                self._thread.start()

    def collect(self, timeout_s: float) -> dict[int, RequestOutput]:
        """Return what has ended; wait ``timeout_s`` for the first, unless nothing is under way or all is paused."""
        latest = time.monotonic() + timeout_s
        is_over = timeout_s <= 0
        while True:
            with self.between_steps("collect"):
                if self._jobs.ready() or not self._jobs.samples or self._held or is_over:
                    done = self._jobs.collect()
                    break
                self._news.clear()
            is_over = not self._await_news(latest)
        return {number: job.output() for number, job in done.items()}  # steps go on meanwhile

    def _await_news(self, latest: float) -> bool:
        """Wait for news, unless nobody waits for ``collect`` any more; return False if there are none."""
        while (left_s := latest - time.monotonic()) > 0 and not self._processes.context.is_cancelled():
            if self._news.wait(min(left_s, LOOK_S)):
                return True
        return False

    def progress(self) -> dict[int, int]:
        """Return the tokens that each request under way has so far, by its number."""
        with self.between_steps("progress"):
            return self._jobs.progress({})

    def abort(self, numbers: Sequence[int] | None) -> int:
        """Cancel these requests, or all that were submitted; return how many were unfinished. None is collected."""
        with self.between_steps("abort"):
            chosen = self._jobs.submitted(numbers)
            self._drop(chosen)
            self._jobs.forget_outputs(numbers)
            self._news.set()
            return len(chosen)

    def pause(self, mode: PauseMode) -> None:
        """Make no more steps. "abort" cancels what is under way, "wait" finishes it first, "keep" leaves it."""
        check_pause_mode(mode)
        if mode == "abort":
            self.abort(None)
        with self.between_steps("pause"):
            while mode == "wait" and self._jobs.samples:
                self._step(())
            self._held.add(PAUSED)
            self._news.set()

    def resume(self) -> None:
        """Go on after ``pause``."""
        with self._locked():
            self._held.discard(PAUSED)

    def hold(self, reason: str) -> None:
        """Make no step until this reason and all others are released."""
        with self._locked():
            self._held.add(reason)
            self._news.set()

    def release(self, *reasons: str) -> None:
        with self._locked():
            self._held.difference_update(reasons)

    def forget_cached(self) -> None:
        """Drop all cached keys, values and encodings; requests under way compute theirs again."""
        with self.between_steps("forget_cached"):
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------------------------------------------ steps

    def _run_in_background(self) -> None:
        self._activate()
        while True:
            while self._num_waiting:  # a lock is not fair
                time.sleep(1e-4)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._jobs.samples and not self._held))
                if self._is_closed:
                    return
                try:
                    with self._processes.needed_for("submit"):
                        self._step(())
                except BaseException as error:  # the next call raises it
                    self._failure = error
                    self._news.set()
                    return

    def _step(self, counted: Sequence[int]) -> int:
        """Make one step of the engine; return how many samples of the ``counted`` jobs ended."""
        num_ended = 0
        for output in self._engine.step():
            sample = self._jobs.samples.get(output.request_id)
            if sample is not None and self._take(output, sample):
                num_ended += sample.job.number in counted
                self._news.set()
        return num_ended

    def _take(self, output: VllmRequestOutput, sample: RunningSample) -> bool:
        """Add a step's tokens to a sample; return True if it has ended."""
        (sampled,) = output.outputs
        token_ids = list(sampled.token_ids)
        logprobs = [float(entry[token].logprob) for token, entry in zip(token_ids, sampled.logprobs or (), strict=True)]
        sample.add(token_ids, logprobs)
        if sampled.finish_reason is None:
            return False
        sample.close_span(self._version)
        completion = partial(
            self._reader.completion,
            sample.token_ids,
            sample.logprobs,
            is_stopped=sampled.finish_reason == "stop",
            spans=tuple(sample.spans),
            routed_experts=versions.routed_experts(sampled),
        )
        self._jobs.end(output.request_id, completion)
        return True

    def _add(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, is_streamed: bool
    ) -> None:
        for job, token_ids, one in self._jobs.read(numbers, prompts, params):
            given = self._as_vllm_takes_it(token_ids)
            keys = sample_keys(token_ids, seed=one.seed, n=one.n) if one.seed is not None else [None] * one.n
            for index, key in enumerate(keys):
                name = f"{job.number}-{index}"
                self._jobs.samples[name] = RunningSample(job, index)
                try:
                    self._engine.add_request(name, given, self._sampling(one, key, is_streamed=is_streamed))
                except ValueError as error:  # such as an image for which its cache has no room
                    raise InvalidInputError(f"vLLM refuses a prompt of {len(token_ids)} tokens: {error}") from error

    def _as_vllm_takes_it(self, prompt: Sequence[int]) -> Any:
        if not isinstance(prompt, MultimodalPrompt):
            return {"prompt_token_ids": list(prompt)}
        return versions.image_prompt(self._engine, prompt, self._reader.image_spans(prompt))

    def _sampling(self, params: SamplingParams, key: int | None, *, is_streamed: bool) -> Any:
        return versions.sampling_params(
            is_streamed=is_streamed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            stop_token_ids=self._jobs.stop_token_ids(params),
            ignore_eos=True,  # the model's own stops are named above
            seed=key,
        )

    # ------------------------------------------------------------------------------------------------ state

    def _drop(self, numbers: Collection[int]) -> None:
        self._engine.abort_request(self._jobs.names_of(numbers))
        self._jobs.forget(numbers)

    def weights_changed(self, version: int) -> None:
        """Note the version of new weights; cached results of the old ones are dropped and computed again if needed."""
        with self.between_steps("weights_changed"):
            self._set_version(version)
            self.forget_cached()

    def renumber(self, version: int) -> None:
        """Note another version of the same weights: what was computed with them holds."""
        with self.between_steps("renumber"):
            self._set_version(version)

    def _set_version(self, version: int) -> None:
        if version != self._version:
            for sample in self._jobs.samples.values():
                sample.close_span(self._version)
            self._version = version

    def _require_stepping(self) -> None:
        if isinstance(self._failure, WorkerDiedError):
            raise self._failure
        if self._failure is not None:
            raise RlcoreError(
                f"vLLM failed in the background and makes no more steps: {self._failure}; call restart()"
            ) from self._failure
