"""A trace notes by whom a worker is called, on which device, with which results, and other hosts' clocks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore import spans
from rlcore.engines.launchers import traced_calls
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.inline import start_inline
from rlcore.engines.launchers.traced_calls import note_workers, results_of
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.rank_batch import rank_batches
from rlcore.engines.sampling.completion import Completion, RequestOutput
from rlcore.errors import WorkerError
from rlcore.trace.events import read_trace
from rlcore.trace.kernels import recorded_calls
from rlcore.types import OffloadReport


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        pass

    def train_step(self, fails: bool = False) -> float:
        if fails:
            raise ValueError("no")
        return float(torch.ones(8, 8).mm(torch.ones(8, 8)).sum())

    def close(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the recorder of this process, which records kernels too."""
    monkeypatch.setattr(spans, "recorder", None)
    for name in ("RLCORE_TRACE", "RLCORE_TRACE_KERNELS"):
        monkeypatch.setenv(name, "")
    traced_calls._counts.clear()
    spans.start(tmp_path, records_kernels=True)
    yield tmp_path
    traced_calls._counts.clear()


def group_of_one() -> WorkerGroup:
    return start_inline(Worker, WorkerContext("the train engine", 0, 1, "cpu:0", 77), 60.0)


def test_a_call_has_a_span_of_the_program_and_one_of_the_worker(folder: Path) -> None:
    group = group_of_one()
    group.call("train_step", [((), {})])
    group.stop()
    found = [(span.name, span.kind, span.depth) for span in read_trace(folder).spans]
    assert found == [
        ("start", "worker", 0),
        ("train_step", "call", 0),
        ("train_step", "worker", 1),
        ("close", "worker", 0),
    ]
    worker = read_trace(folder).spans[2]
    assert (worker.engine, worker.facts["device"], worker.facts["rank"]) == (77, "cpu:0", 0)


def test_a_call_that_fails_says_so_and_the_next_is_traced(folder: Path) -> None:
    group = group_of_one()
    with pytest.raises(WorkerError):
        group.call("train_step", [((True,), {})])
    group.call("train_step", [((), {})])
    calls = read_trace(folder).calls
    assert [call.facts.get("error") for call in calls] == ["WorkerError", None]


@pytest.mark.slow
def test_the_profiler_records_the_third_call_of_a_method(folder: Path) -> None:
    group = group_of_one()
    for _ in range(4):
        group.call("train_step", [((), {})])
    trace = read_trace(folder)
    steps = [span for span in trace.spans if span.name == "train_step" and span.is_of_worker]
    assert ["kernels" in span.facts for span in steps] == [False, False, True, False]
    (call,) = recorded_calls(folder, trace)
    assert call.span is steps[2] and call.is_of_host
    assert "aten::mm" in {kernel.name for kernel in call.top}
    begin, end = call.intervals[0][0], max(end for _, end, _ in call.intervals)
    assert steps[2].begin_ns <= begin and end <= steps[2].end_ns, "on the clock of the spans"


def output(*lengths: int) -> RequestOutput:
    completions = [Completion([1] * length, [0.0] * length, "", "stop", ()) for length in lengths]
    return RequestOutput(None, [1], completions)


def report(nbytes: int, seconds: float, *, pinned: bool = True) -> OffloadReport:
    return OffloadReport(moved_bytes=nbytes, freed_device_bytes=0, seconds=seconds, pinned=pinned, first_use=False)


def test_results_are_told_in_numbers() -> None:
    each: list[Any] = [((), {})] * 2
    assert results_of(each, [[output(3, 4)], [output(9)]]) == {"prompts": 2, "tokens": 16, "longest": 9}
    assert results_of(each, [{5: output(2)}, {}]) == {"prompts": 1, "tokens": 2, "longest": 2}
    assert results_of(each, [None, None]) == {} == results_of(each, [{}, {}])
    moved = results_of([(("weights",), {})] * 2, [report(10, 2.0), report(30, 1.0, pinned=False)])
    expected = {"bytes": 40, "most_bytes": 30, "seconds": 2.0, "pinned": False, "first_use": False}
    assert moved == {"tag": "weights"} | expected
    plan = [(0, "offload", "weights"), (1, "onload", "kv_cache")]
    swapped = results_of([((plan,), {})], [[report(10, 1.0), report(20, 2.0)]])
    assert [(one["move"], one["tag"], one["bytes"]) for one in swapped["moves"]] == [
        ("offload", "weights", 10),
        ("onload", "kv_cache", 20),
    ]
    packed = {"input_ids": torch.arange(7), "cu_seqlens": torch.tensor([0, 3, 7])}
    batch = rank_batches(packed, 1, 4)[0]
    assert results_of([((batch,), {})], [{"loss": 1.0}]) == {"tokens": 7, "micro_batches": 2}


class SlowClock:
    """A worker of another host, whose clock is five seconds ahead; some of its answers come late.

    Time passes here alone: on a busy machine the fastest answer may be as late as any.
    """

    def __init__(self, host: str) -> None:
        self.context = SimpleNamespace(host=host)
        self.now_ns = 7_000_000
        self.delays_ns = iter((20_000_000, 2_000_000, 30_000_000, *(20_000_000,) * 20))

    def call(self, method: str) -> Future[Any]:
        assert method == "clock"
        self.now_ns += next(self.delays_ns)
        answer: Future[Any] = Future()
        answer.set_result(("boot-b", self.now_ns + 5_000_000_000))
        return answer


def test_the_clock_of_another_host_is_the_one_that_answered_fastest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [SlowClock(host) for host in (socket.gethostname(), "host-b", "host-b")]
    monkeypatch.setattr(traced_calls, "time", SimpleNamespace(monotonic_ns=lambda: workers[1].now_ns))
    note_workers(SimpleNamespace(workers=workers))  # type: ignore[arg-type]
    (clock,) = read_trace(folder).processes[0].clocks
    assert clock["boot"] == "boot-b"
    # Read between question and answer: that far it may be wrong, and no further.
    assert abs(clock["ahead_ns"] - 5_000_000_000) <= clock["error_ns"] == 1_000_000
