"""A replica whose engine fails; nothing here needs vLLM, whose engine another plays."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.executors import worker
from rlcore.engines.executors.vllm import versions
from rlcore.engines.executors.vllm.replica import Replica
from rlcore.engines.executors.vllm.worker import VllmWorker
from rlcore.engines.executors.vllm.worker_processes import WorkerProcesses
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling_params import SamplingParams
from rlcore.errors import RlcoreError

READER: Any = SimpleNamespace(read=lambda prompts, params: prompts, stop_token_ids=())


class FailingEngine:
    def __init__(self) -> None:
        self.requests: list[str] = []

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.requests.append(request_id)

    def abort_request(self, request_ids: list[str]) -> None:
        self.requests = [one for one in self.requests if one not in request_ids]

    def step(self) -> Any:
        raise RuntimeError("an illegal memory access")


@pytest.fixture
def engine() -> FailingEngine:
    return FailingEngine()


@pytest.fixture
def replica(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr(versions, "sampling_params", lambda **_: None)
    replica = Replica(engine, WorkerProcesses(WorkerContext("it", 0, 1, "cpu:0", 1, ("cpu:0",))), READER, lambda: None)
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


def test_host_memory_is_reserved_while_vllm_loads_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that vLLM has yet to start are told later."""
    asked: list[Any] = []
    arena = SimpleNamespace(
        limit_bytes=None, set_limit=lambda nbytes: asked.append(("limit", nbytes)), reserve=asked.append
    )
    monkeypatch.setattr(worker, "arena_of", lambda device: arena)
    alone, several = (VllmWorker(WorkerContext("it", 0, 1, "cpu:0", 1, ("cpu:0",) * count)) for count in (1, 2))
    several.reserve_host_memory(1 << 20, 4096)
    assert (asked, several._host_memory) == ([], (1 << 20, 4096))
    alone.reserve_host_memory(1 << 20, 4096)
    assert (asked, alone._host_memory) == ([("limit", 1 << 20), 4096], None)
