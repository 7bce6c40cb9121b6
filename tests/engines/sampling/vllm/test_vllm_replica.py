"""A replica whose engine fails, is interrupted, or gets new weights; nothing needs vLLM, whose engine another plays."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload import host_arena
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.executor import VllmExecutor
from rlcore.engines.sampling.vllm.replica import Replica
from rlcore.engines.sampling.vllm.worker_processes import vllm_processes
from rlcore.errors import InvalidInputError, RlcoreError, StateError

CONTEXT = WorkerContext("it", 0, 1, "cpu:0", 1, ("cpu:0",))
READER: Any = SimpleNamespace(
    read=lambda prompts, params: prompts,
    stop_token_ids=(),
    completion=lambda token_ids, logprobs, **rest: SimpleNamespace(token_ids=token_ids, **rest),
)


class FailingEngine:
    def __init__(self) -> None:
        self.requests: list[str] = []

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.requests.append(request_id)

    def abort_request(self, request_ids: list[str]) -> None:
        self.requests = [one for one in self.requests if one not in request_ids]

    def step(self) -> Any:
        raise RuntimeError("an illegal memory access")


class CachingEngine(FailingEngine):
    """Samples a token a step and request: what its keys and values, one a token, were computed with, added up.

    As in vLLM, requests under way keep theirs unless they are reset too, and compute them again then.
    """

    weights = 1

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps
        self.before_step: Callable[[], None] = lambda: None
        self._caches: dict[str, list[int]] = {}
        self.seen: dict[str, list[int]] = {}

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        super().add_request(request_id, prompt, params)
        self._caches[request_id], self.seen[request_id] = [], []

    def step(self) -> Any:
        self.before_step()
        found = []
        for name in list(self.requests):
            cache, seen = self._caches[name], self.seen[name]
            cache += [self.weights] * (len(seen) + 1 - len(cache))
            seen.append(sum(cache))
            reason = "length" if len(seen) == self._num_steps else None
            if reason:
                self.requests.remove(name)
            logprobs = [{seen[-1]: SimpleNamespace(logprob=-1.0)}]
            sampled = SimpleNamespace(token_ids=seen[-1:], logprobs=logprobs, finish_reason=reason)
            found.append(SimpleNamespace(request_id=name, outputs=[sampled]))
        return found

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if reset_running_requests:
            self._caches = {name: [] for name in self._caches}
        return reset_running_requests or not self.requests

    def reset_mm_cache(self) -> None:
        """It has none."""

    reset_encoder_cache = reset_mm_cache


@pytest.fixture
def engine() -> FailingEngine:
    return FailingEngine()


@pytest.fixture
def replica(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    replica = Replica(engine, vllm_processes(CONTEXT), READER, lambda: None)
    yield replica
    replica.close()


def test_what_fails_in_the_background_is_told_to_whoever_asks_next(replica: Replica) -> None:
    replica.submit([0], [[1, 2]], [SamplingParams(n=3)], 0)
    for _ in range(2):
        with pytest.raises(RlcoreError) as caught:
            replica.collect(timeout_s=60)
        assert str(caught.value) == (
            "vLLM failed in the background and makes no more steps: an illegal memory access; call restart()"
        )
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_what_fails_in_generate_leaves_no_request(replica: Replica, engine: FailingEngine) -> None:
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        replica.run([[1, 2]], [SamplingParams(n=3)], 0, lambda number: None)
    assert engine.requests == [] and replica.progress() == {}


def test_what_vllm_refuses_leaves_no_request(
    replica: Replica, engine: FailingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the prompt nor of those before it in the call."""
    add_request = engine.add_request

    def add(request_id: str, prompt: Any, params: Any) -> None:
        if len(prompt["prompt_token_ids"]) == 3:
            raise ValueError("its cache has no room for the image")
        add_request(request_id, prompt, params)

    monkeypatch.setattr(engine, "add_request", add)
    prompts, params = [[1, 2], [1, 2, 3]], [SamplingParams(n=2)] * 2
    for ask in (
        lambda: replica.run(prompts, params, 0, lambda number: None),
        lambda: replica.submit([0, 1], prompts, params, 0),
    ):
        with pytest.raises(InvalidInputError, match=r"^vLLM refuses a prompt of 3 tokens: its cache has no room for"):
            ask()
        assert engine.requests == [] and replica.progress() == {}


def test_requests_under_way_compute_their_cache_again_with_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    engine: Any = CachingEngine(num_steps=5)
    replica = Replica(engine, vllm_processes(CONTEXT), READER, lambda: None)

    def sync_after_three_steps() -> None:
        if engine.weights == 1 and all(len(seen) == 3 for seen in engine.seen.values()):
            engine.weights = 100
            replica.weights_changed(version=8)

    engine.before_step = sync_after_three_steps
    outputs: list[Any] = replica.run([[1], [2]], [SamplingParams(), SamplingParams()], 7, lambda number: None)
    for output in outputs:
        (made,) = output.outputs
        assert made.token_ids == [1, 2, 3, 400, 500], "no key or value of the old weights is left"
        assert [(span.version, span.start, span.end) for span in made.spans] == [(7, 0, 3), (8, 3, 5)]


def test_a_sync_of_nothing_new_keeps_what_was_computed_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """To drop a prefix cache takes a millisecond and more, and whatever is sampled next computes it again."""
    resets: list[str] = []
    engine: Any = SimpleNamespace(
        reset_prefix_cache=lambda **_: resets.append("prefixes"),
        reset_mm_cache=lambda: resets.append("images"),
        reset_encoder_cache=lambda: resets.append("encodings"),
    )
    executor = VllmExecutor(CONTEXT)
    replica = executor._replica = Replica(engine, vllm_processes(CONTEXT), READER, lambda: None)
    monkeypatch.setattr(executor, "_call_each", lambda method, calls: [None for _ in calls])
    for version, has_moved in ((1, True), (2, False)):
        executor.sync_call("begin", [(version, "a trainer", "digest", not has_moved, False)])
        assert replica._held
        executor.sync_call("commit", [(version, version, has_moved)])
        assert (replica.version, replica._held) == (version, set())
        assert resets == ["prefixes", "images", "encodings"], "once, by the first of the two"


def test_a_collect_that_finds_nothing_is_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight update pauses the sampler after it: it would wait until the last sample has ended."""

    def keep_the_interpreter() -> None:
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            pass

    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    engine: Any = CachingEngine(num_steps=2000)
    engine.before_step = keep_the_interpreter
    replica = Replica(engine, vllm_processes(CONTEXT), READER, lambda: None)
    replica.submit([0], [[1]], [SamplingParams()], 0)
    try:
        for _ in range(5):
            assert replica.collect(timeout_s=0.01) == {}
        assert len(engine.seen["0-0"]) < 1000
        assert replica.abort(None) == 1
    finally:
        replica.close()


@pytest.mark.parametrize("change", ["pause", "hold", "abort", "fail"])
def test_what_changes_meanwhile_ends_a_collect(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    engine: Any = CachingEngine(num_steps=1 << 30)
    goes_on = threading.Event()
    engine.before_step = lambda: goes_on.wait(0.001)

    def fail() -> None:
        engine.before_step = lambda: 1 / 0

    replica = Replica(engine, vllm_processes(CONTEXT), READER, lambda: None)
    replica.submit([0], [[1]], [SamplingParams()], 0)
    what = {"pause": lambda: replica.pause("keep"), "hold": lambda: replica.hold("a sync"), "fail": fail}
    changed = threading.Timer(0.05, what.get(change, lambda: replica.abort(None)))
    changed.start()
    began = time.monotonic()
    try:
        with pytest.raises(RlcoreError, match="division by zero") if change == "fail" else contextlib.nullcontext():
            assert replica.collect(timeout_s=60) == {}
        assert time.monotonic() - began < 30
    finally:
        changed.join()
        replica.resume()
        replica.close()


def test_a_collect_ends_when_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another replica has had something."""
    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    engine: Any = CachingEngine(num_steps=1 << 30)
    engine.before_step = lambda: time.sleep(0.001)
    context = replace(CONTEXT, is_cancelled=lambda: any(len(seen) >= 3 for seen in engine.seen.values()))
    replica = Replica(engine, vllm_processes(context), READER, lambda: None)
    replica.submit([0], [[1]], [SamplingParams()], 0)
    began = time.monotonic()
    try:
        assert replica.collect(timeout_s=20) == {}
        assert time.monotonic() - began < 10
        assert replica.abort(None) == 1, "it goes on"
    finally:
        replica.close()


@pytest.mark.parametrize("way", ["generate", "submit"])
def test_steps_go_on_while_texts_are_decoded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many samples may end in one step, and a long one takes milliseconds."""
    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    engine: Any = CachingEngine(num_steps=3)
    decoded_by: list[int] = []

    def completion(token_ids: list[int], logprobs: list[float], **_: Any) -> list[int]:
        decoded_by.append(threading.get_ident())
        another.submit(replica.progress).result(timeout=5)  # which no step makes while it has the lock
        return token_ids

    reader: Any = SimpleNamespace(read=READER.read, stop_token_ids=(), completion=completion)
    with ThreadPoolExecutor(1) as another:
        replica = Replica(engine, vllm_processes(CONTEXT), reader, lambda: None)
        try:
            if way == "generate":
                found: Any = replica.run([[1]], [SamplingParams(n=2)], 0, lambda number: None)
            else:
                replica.submit([0], [[1]], [SamplingParams(n=2)], 0)
                found = list(replica.collect(timeout_s=60).values())
        finally:
            replica.close()
    assert [output.outputs for output in found] == [[[1, 2, 3], [1, 2, 3]]]
    assert decoded_by == [threading.get_ident()] * 2


def test_a_call_that_its_caller_gave_up_ends_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    engine: Any = CachingEngine(num_steps=1000)
    context = replace(CONTEXT, is_cancelled=lambda: any(len(seen) == 3 for seen in engine.seen.values()))
    replica = Replica(engine, vllm_processes(context), READER, lambda: None)
    with pytest.raises(StateError, match=r"generate\(\) has ended early: nobody waits for it any more"):
        replica.run([[1], [2]], [SamplingParams(), SamplingParams(n=2)], 0, lambda number: None)
    assert (engine.requests, replica.progress()) == ([], {})
    assert [len(seen) for seen in engine.seen.values()] == [3, 3, 3]


def test_host_memory_is_reserved_while_vllm_loads_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that vLLM has yet to start are told later."""
    asked: list[Any] = []
    arena = SimpleNamespace(
        limit_bytes=None, set_limit=lambda nbytes: asked.append(("limit", nbytes)), reserve=asked.append
    )
    monkeypatch.setattr(host_arena, "arena_of", lambda device: arena)
    alone, several = (VllmExecutor(WorkerContext("it", 0, 1, "cpu:0", 1, ("cpu:0",) * count)) for count in (1, 2))
    several.reserve_host_memory(1 << 20, 4096)
    assert (asked, several._host_memory) == ([], (1 << 20, 4096))
    alone.reserve_host_memory(1 << 20, 4096)
    assert (asked, alone._host_memory) == ([("limit", 1 << 20), 4096], None)
