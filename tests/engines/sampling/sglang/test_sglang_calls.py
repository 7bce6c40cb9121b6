"""Calls of shards over the executor's socket; threads play the schedulers, and nothing here needs SGLang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.replica.calls import results_of
from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses
from rlcore.engines.sampling.sglang import executor, scheduler_process
from rlcore.engines.sampling.sglang.scheduler_process import FOLDER, SOCKET, last_words, serve
from rlcore.engines.sampling.sglang.shard_calls import ShardCalls
from rlcore.errors import InvalidInputError, StateError, UnsupportedError, WorkerDiedError, WorkerError
from rlcore.process.guard import FAMILY

CONTEXT = WorkerContext("the inference engine", 0, 1, "cpu:0", 1, ("cpu:0", "cpu:1"))
RANK = threading.local()


class Shard:
    def __init__(self, rank: int) -> None:
        self.rank, self.steps = rank, 0
        self.receiver = SimpleNamespace(begin=lambda number: [rank, number])

    def refuse(self, how: str) -> None:
        if self.rank == 1:
            raise StateError("not now") if how == "ours" else ValueError("of SGLang")

    def end(self) -> None:
        raise SystemExit


class Schedulers:
    """Come to ``serve`` at different times, and make steps when they do not wait."""

    def __init__(self) -> None:
        self.shards: list[Any] = [Shard(0), Shard(1)]

    def come(self) -> None:
        threads = [threading.Thread(target=self._serve, args=[rank]) for rank in (1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, rank: int) -> None:
        RANK.rank = rank
        scheduler: Any = SimpleNamespace(_rlcore_shard=self.shards[rank])
        try:
            serve(scheduler)
        except SystemExit:
            return
        if self.shards[rank] is not None:
            self.shards[rank].steps += 1


def watched() -> WorkerProcesses:
    return WorkerProcesses(CONTEXT, 0, lambda process: "it", reports_errors=False)


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch, short_runtime_folder: Path) -> Schedulers:
    monkeypatch.setenv(FOLDER, str(short_runtime_folder))
    monkeypatch.setattr(scheduler_process.dist, "get_rank", lambda: RANK.rank)
    return Schedulers()


@pytest.fixture
def calls(schedulers: Schedulers) -> Iterator[ShardCalls]:
    made = ShardCalls(os.environ[FOLDER], SOCKET, 2, watched(), schedulers.come)
    yield made
    made.end()
    assert not os.path.exists(os.path.join(os.environ[FOLDER], SOCKET))


def test_each_shard_is_called_with_its_arguments_in_the_order_of_ranks(
    calls: ShardCalls, schedulers: Schedulers
) -> None:
    calls.open("a weight sync")
    answers = calls.answers("receiver.begin", [(5,), (6,)])
    assert results_of(answers, CONTEXT, "begin") == [[0, 5], [1, 6]]
    assert calls.pids == {0: os.getpid(), 1: os.getpid()}
    assert [shard.steps for shard in schedulers.shards] == [0, 0], "they wait for further calls"
    calls.close()
    assert [shard.steps for shard in schedulers.shards] == [1, 1]


@pytest.mark.parametrize(("how", "kind"), [("ours", StateError), ("theirs", WorkerError)])
def test_an_error_of_a_shard_is_raised_and_the_shards_answer_on(
    calls: ShardCalls, how: str, kind: type[Exception]
) -> None:
    calls.open("move")
    with pytest.raises(kind, match=r"not now|of SGLang"):
        results_of(calls.answers("refuse", [(how,), (how,)]), CONTEXT, "move")
    assert results_of(calls.answers("receiver.begin", [(1,), (2,)]), CONTEXT, "begin") == [[0, 1], [1, 2]]
    calls.close()


def test_a_shard_that_cannot_be_made_is_told_as_it_was(
    calls: ShardCalls, schedulers: Schedulers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """build() makes the first call: so it raises the error, and no scheduler has ended."""

    def refuse(_: object) -> None:
        raise UnsupportedError("this cache", "it cannot be moved")

    monkeypatch.setattr(scheduler_process, "SglangShard", refuse)
    schedulers.shards = [None, None]
    calls.open("build")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="it cannot be moved"):
            results_of(calls.answers("limit", [(), ()]), CONTEXT, "limit")


def test_a_scheduler_that_ends_in_a_call_is_not_waited_for(calls: ShardCalls) -> None:
    calls.open("move")
    with pytest.raises(ConnectionError, match="the other end has closed"):
        calls.answers("end", [(), ()])


def test_schedulers_that_do_not_come_because_one_has_ended(
    calls: ShardCalls, schedulers: Schedulers, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = watched()
    come: Callable[[], None] = lambda: setattr(processes, "_lost", "SGLang's scheduler, which has ended")  # noqa: E731
    monkeypatch.setattr(calls, "_processes", processes)
    monkeypatch.setattr(calls, "_call_schedulers", come)
    with pytest.raises(WorkerDiedError, match=r"lost SGLang's scheduler, which has ended, during move\(\)"):
        calls.open("move")


def test_a_folder_whose_sockets_would_have_too_long_paths_is_refused() -> None:
    assert executor._checked("/tmp/" + "x" * 90)
    with pytest.raises(InvalidInputError, match="at most 107 bytes of it: let RLCORE_RUNTIME name a folder"):
        executor._checked("/tmp/" + "x" * 91)


def test_the_error_that_ends_a_scheduler_is_found_by_its_process(
    schedulers: Schedulers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(scheduler_process, "remove_memory", lambda files: None)
    monkeypatch.setattr(scheduler_process.versions, "run_scheduler", lambda *_, **__: None)
    log = logging.getLogger(scheduler_process.versions.SCHEDULER_LOG)
    monkeypatch.setattr(log, "handlers", [])
    scheduler_process.run_scheduler()
    assert last_words(str(tmp_path)) == ""
    log.error("Failed to call rpc move: it is not the end")
    assert last_words(str(tmp_path)) == ""
    log.error("Scheduler hit an exception: Traceback (most recent call last):\n  ...\nValueError: no such format\n")
    assert last_words(str(tmp_path)) == last_words(str(tmp_path), os.getpid()) == "ValueError: no such format"
    assert last_words(str(tmp_path), 1) == ""


def test_a_scheduler_that_fails_removes_what_it_shares_by_name(tmp_path: Path) -> None:
    """SGLang's end leaves its loads in /dev/shm, 16 KiB for each engine that could not start."""
    shared = Path(f"/dev/shm/sglang_loads_{tmp_path.parent.name}_{os.getpid()}.shm")
    shared.write_bytes(bytes(4096))
    code = f"""
import mmap
from rlcore.engines.sampling.sglang import scheduler_process
def fail(*_, **__):
    with open({str(shared)!r}, "r+b") as file:
        scheduler_process.mapped = mmap.mmap(file.fileno(), 0)
    raise ValueError("no such format")
scheduler_process.versions.run_scheduler = fail
scheduler_process.run_scheduler()
"""
    try:
        environment = os.environ | {FOLDER: str(tmp_path), FAMILY: "a family of its own"}
        told = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert "ValueError: no such format" in told.stderr
        assert not shared.exists()
    finally:
        shared.unlink(missing_ok=True)
