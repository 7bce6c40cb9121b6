"""A replica reads SGLang's outputs; a manager of requests and shards play SGLang, and nothing here needs it."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.completion import VersionSpan
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import PromptReader
from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses
from rlcore.engines.sampling.sglang import replica as module
from rlcore.engines.sampling.sglang.engine_thread import EngineThread
from rlcore.engines.sampling.sglang.replica import SglangReplica
from rlcore.errors import RlcoreError, StateError, WorkerDiedError

CONTEXT = WorkerContext("the inference engine", 0, 1, "cpu:0", 1, ("cpu:0",))


class Sglang:
    """Its requests get tokens when a test says so; it is paused when a test's replica says so."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._ended: dict[str, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_event_loop()
        self.requests: dict[str, Any] = {}
        self.tokenizer_manager: Any = self
        self.about: dict[str, Any] = {}
        """These are what it says of each output besides."""

    async def generate_request(self, request: Any) -> AsyncGenerator[Any, None]:
        self.requests[request.rid], self.tokens[request.rid] = request, []
        self._ended[request.rid] = self._loop.create_future()
        yield await self._ended[request.rid]

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        return []

    def abort_request(self, name: str) -> None:
        self.aborted += [rid for rid in self.tokens if rid.startswith(name)]

    def end(self, name: str, reason: str = "length", logprob: float = -0.5) -> None:
        self.leave(name, reason, logprob)()

    def leave(self, name: str, reason: str = "length", logprob: float = -0.5) -> Callable[[], object]:
        """End a request in the schedulers; return what brings its output."""
        output = {
            "output_ids": self.tokens[name],
            "meta_info": self.about
            | {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [(logprob, token, None) for token in self.tokens[name]],
            },
        }
        del self.tokens[name]
        return lambda: self._loop.call_soon_threadsafe(self._ended[name].set_result, output)


class Calls:
    """Shards that answer at once."""

    are_open = False

    def __init__(self, sglang: Sglang) -> None:
        self._sglang = sglang

    def open(self, purpose: str) -> None:
        self.are_open = True

    def close(self) -> None:
        self.are_open = False

    def answers(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[bytes]:
        import msgspec

        self._sglang.calls.append((method, calls[0]))
        lengths = {name: len(tokens) for name, tokens in self._sglang.tokens.items()}
        return [msgspec.msgpack.encode((lengths if method == "progress" else None, None))]


class Made:
    def __init__(self, replica: SglangReplica, sglang: Sglang, processes: WorkerProcesses) -> None:
        self.replica, self.sglang, self.processes = replica, sglang, processes

    def submit(self, count: int = 1, **params: Any) -> None:
        self.replica.submit([*range(count)], [[5, 6]] * count, [SamplingParams(**params)] * count, 0)
        self.until(lambda: len(self.sglang.requests) >= count * params.get("n", 1))

    def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(200):
            if holds():
                return
            self.replica._thread.begin(asyncio.sleep(0.005)).result()
        raise AssertionError("it did not come")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    def request(name: str, token_ids: list[int], params: dict[str, Any], *, returns_experts: bool) -> Any:
        return SimpleNamespace(rid=name, input_ids=token_ids, params=params, returns_experts=returns_experts)

    monkeypatch.setattr(module.versions, "generate_request", request)
    thread = EngineThread(Sglang)  # type: ignore[arg-type]
    sglang: Any = thread.engine
    reader = object.__new__(PromptReader)
    reader.__dict__ |= {
        "tokenizer": None,
        "stop_token_ids": (1,),
        "_vocab_size": 50,
        "max_positions": None,
        "max_prompt": None,
        "images": None,
    }
    processes = WorkerProcesses(CONTEXT, 0, lambda process: "it", reports_errors=False)
    calls: Any = Calls(sglang)
    yield Made(SglangReplica(thread, calls, processes, reader, 0), sglang, processes)
    thread.end()


def test_a_completion_tells_the_versions_of_its_tokens(made: Made) -> None:
    """One goes on after new weights, and the end of another is still on its way when they come."""
    made.submit(2)
    made.sglang.tokens |= {"0-0.": [7, 8, 9], "1-0.": [4, 4]}
    bring = made.sglang.leave("1-0.")
    made.replica.hold("a weight sync")
    made.replica.weights_changed(4)
    bring()
    made.replica.release("a weight sync")
    made.sglang.tokens["0-0."] += [2, 2]
    made.sglang.end("0-0.")
    found: dict[int, Any] = {}
    made.until(lambda: bool(found.update(made.replica.collect(0)) or len(found) == 2))
    assert found[0].outputs[0].version_spans == (VersionSpan(0, 0, 3), VersionSpan(4, 3, 5))
    assert found[1].outputs[0].version_spans == (VersionSpan(0, 0, 2),)
    assert [method for method, _ in made.sglang.calls] == ["pause", "progress", "flush", "go_on"]
    assert made.sglang.calls[0] == ("pause", (False,)), "the caches are of the old weights"


def test_another_number_of_the_same_weights_drops_no_cache(made: Made) -> None:
    made.submit()
    made.sglang.tokens["0-0."] += [7, 8]
    made.replica.hold("a weight sync")
    made.replica.renumber(4)
    made.replica.release("a weight sync")
    made.sglang.tokens["0-0."] += [2]
    made.sglang.end("0-0.")
    found: dict[int, Any] = {}
    made.until(lambda: bool(found.update(made.replica.collect(0)) or found))
    assert found[0].outputs[0].version_spans == (VersionSpan(0, 0, 2), VersionSpan(4, 2, 3))
    assert [method for method, _ in made.sglang.calls] == ["pause", "progress", "go_on"]


def test_a_pause_that_keeps_requests_keeps_their_caches(made: Made) -> None:
    made.submit()
    made.replica.pause("keep")
    assert made.replica.collect(5.0) == {}, "it does not wait for what cannot come"
    with pytest.raises(StateError, match="refused while the engine is paused"):
        made.replica.run([[5]], [SamplingParams()], 0, lambda _: None)
    made.replica.hold("a weight sync")
    made.replica.resume()
    assert made.sglang.calls[:2] == [("pause", (True,)), ("pause", (False,))]
    assert "go_on" not in dict(made.sglang.calls), "the weight sync still holds it"
    made.replica.release("a weight sync")
    assert made.sglang.calls[-1] == ("go_on", ())


def test_a_collect_ends_when_nobody_waits_for_it(made: Made) -> None:
    """As when another replica has had something."""
    made.submit()
    made.replica._context = replace(CONTEXT, is_cancelled=lambda: True)
    began = time.monotonic()
    assert made.replica.collect(20.0) == {}
    assert time.monotonic() - began < 10


def test_completions_have_routes_where_the_engine_returns_them(made: Made) -> None:
    """SGLang sends them as base64 of int32, without a shape."""
    made.submit()
    assert not made.sglang.requests["0-0."].returns_experts
    made.replica.num_routed_layers = 2
    made.replica.submit([7], [[5, 6]], [SamplingParams()], 0)
    made.until(lambda: "7-0." in made.sglang.requests)
    assert made.sglang.requests["7-0."].returns_experts
    made.sglang.tokens["7-0."] = [8, 9]
    routes = torch.arange(3 * 2 * 4, dtype=torch.int32).view(3, 2, 4)
    made.sglang.about = {
        "routed_experts": base64.b64encode(routes.numpy().tobytes()).decode(),
        "prompt_tokens": 2,
        "completion_tokens": 2,
    }
    made.sglang.end("7-0.")
    found = made.replica.collect(5.0)[7].outputs[0].routed_experts
    assert found is not None and torch.equal(found, routes.to(torch.int16))


def test_an_abort_reaches_no_other_request(made: Made) -> None:
    """SGLang cancels all whose names begin with the given one."""
    made.submit(12)
    assert made.replica.abort([1]) == 1
    made.until(lambda: bool(made.sglang.aborted))
    assert made.sglang.aborted == ["1-0."]
    assert made.replica.abort(None) == 11


def test_requests_name_their_stops_and_have_keys_of_their_own(made: Made) -> None:
    made.submit(1, n=3, seed=5, stop_token_ids=(9,))
    made.replica.submit([7], [[5, 6]], [SamplingParams(n=3, seed=5, ignore_eos=True)], 0)
    made.until(lambda: len(made.sglang.requests) == 6)
    keys = [made.sglang.requests[f"0-{index}."].params["sampling_seed"] for index in range(3)]
    assert len(set(keys)) == 3
    assert keys == [made.sglang.requests[f"7-{index}."].params["sampling_seed"] for index in range(3)]
    assert made.sglang.requests["0-0."].params["stop_token_ids"] == [1, 9]
    assert made.sglang.requests["7-0."].params["stop_token_ids"] == []


@pytest.mark.parametrize(
    ("reason", "logprob", "told"),
    [("length", math.nan, "NaN or infinite logits for prompt"), ("abort", -1.0, "ended a request that nobody cancel")],
)
def test_what_must_not_be_taken_for_an_output_is_an_error(made: Made, reason: str, logprob: float, told: str) -> None:
    made.submit()
    made.sglang.tokens["0-0."] = [7]
    made.sglang.end("0-0.", reason, logprob)
    with pytest.raises(RlcoreError, match=told):
        made.replica.collect(5.0)
    assert made.replica.collect(60.0) == {}, "nothing more comes of it"


def test_a_lost_process_ends_the_wait(made: Made) -> None:
    made.submit()
    made.processes._lost = "SGLang's scheduler, which has ended"
    with pytest.raises(WorkerDiedError, match=r"lost SGLang's scheduler, which has ended, during collect\(\)"):
        made.replica.collect(60.0)
