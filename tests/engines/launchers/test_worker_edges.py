"""What users do to workers without thinking of them: forks, much printing, no descriptors left, dropped engines."""

from __future__ import annotations

import collections
import gc
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlcore.engines.launchers import logs
from rlcore.engines.launchers.failures import describe, raised
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.logs import LogMerger
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import (
    CollectiveTimeoutError,
    InvalidInputError,
    PeerDiedError,
    StateError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from rlcore.process.shared_tensors import SharedTensor  # a msgspec.Struct that a child can import
from tests.engines.ask import ask_all
from tests.warm import LIMIT_S

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file

Start = Callable[..., AbstractContextManager[WorkerGroup]]


class Module:
    """Stands for the user's: its methods have no annotation that says what comes back."""

    def echo(self, value: Any) -> Any:
        return value

    def state(self) -> Any:
        return collections.OrderedDict(loss=np.float64(0.5), steps=np.int64(3), flag=np.bool_(True))


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context, self.module = context, Module()

    def rank(self) -> int:
        return self.context.rank

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def size_of(self, ref: SharedTensor) -> list[int]:
        return list(ref.shape)

    def make(self, kind: type[SharedTensor]) -> list[int]:
        return list(kind("float32", (4,), 0).shape)

    def limit_descriptors(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 1024))  # those that are open stay

    def large(self) -> Any:
        return torch.zeros(100_000)

    def sum_of(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    def add_up(self) -> float:
        self.context.process_group(60.0)
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    def fail(self, how: str) -> None:
        if how == "peers":
            raise PeerDiedError("rank 1 is gone", ranks=(1,))
        error = StateError("a huge number")
        error.code = 2**80  # type: ignore[attr-defined]
        raise error

    def stop_for_breakpoint(self) -> None:
        breakpoint()

    def print_lines(self, number: int) -> None:
        for index in range(number):
            print("line", index)

    def close(self) -> None:
        pass


class AddsUpAtStartAndEnd(Worker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.add_up()

    def close(self) -> None:
        self.add_up()


class Lazy(list):  # type: ignore[type-arg]
    """Makes its tensors while it is pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (), None, (torch.full((4,), float(value)) for value in range(5))


# ----------------------------------------------------------------------------------------- arguments and answers


def test_msgspec_structs_and_their_classes_are_arguments_like_others(join_group: Start) -> None:
    with join_group(Worker) as group:
        assert ask_all(group, "size_of", SharedTensor("float32", (3,), 0)) == [[3]]
        assert ask_all(group, "make", SharedTensor) == [[4]]


def test_tensors_made_while_pickling_arrive_as_they_were(join_group: Start) -> None:
    with join_group(Worker) as group:
        (back,) = ask_all(group, "module.echo", Lazy())
        assert [float(tensor[0]) for tensor in back] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("launcher", ["inline", "process"])
def test_common_answers_come_back_under_both_launchers(join_group: Start, launcher: str) -> None:
    with join_group(Worker, launcher=launcher) as group:
        assert ask_all(group, "module.state") == [{"loss": 0.5, "steps": 3, "flag": True}]


def test_an_error_that_is_an_os_error_too_keeps_its_text() -> None:
    failure = describe(CollectiveTimeoutError("rank 1 did not come", ranks=(1,)))
    error = raised(failure, WorkerContext("the engine", 0, 1, "cpu:0", 1), "gather")
    assert isinstance(error, CollectiveTimeoutError)
    assert str(error) == "rank 1 did not come"
    assert error.ranks == (1,)


def test_attributes_of_our_own_errors_come_along(join_group: Start) -> None:
    with join_group(Worker) as group:
        with pytest.raises(PeerDiedError, match="rank 1 is gone") as caught:
            ask_all(group, "fail", "peers")
        assert caught.value.ranks == (1,)
        with pytest.raises(StateError, match="a huge number"):
            ask_all(group, "fail", "number")
        assert ask_all(group, "rank") == [0]


def test_a_breakpoint_in_a_worker_says_how_to_get_one(join_group: Start) -> None:
    with join_group(Worker) as group, pytest.raises(StateError, match="has no terminal; set RLCORE_DEBUG=pdb"):
        ask_all(group, "stop_for_breakpoint")


def test_the_debugger_says_why_one_worker_is_all(join_group: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "pdb")
    with pytest.raises(InvalidInputError, match=r"'inline' \(RLCORE_DEBUG=pdb forces it\) runs one worker"):
        start_workers(Worker, "the engine", ["cpu:0", "cpu:1"], launcher="inline", timeout_s=5)


# -------------------------------------------------------------------------------------- one thing sent to all ranks


def test_an_argument_of_one_rank_that_cannot_be_sent_stops_the_call_of_all(join_group: Start) -> None:
    with join_group(Worker, 2) as group:
        with pytest.raises(InvalidInputError, match="cannot be sent to a worker process"):
            group.call("module.echo", [((1,), {}), ((threading.Lock(),), {})])
        assert ask_all(group, "rank") == [0, 1]


@pytest.mark.slow
def test_an_interrupt_between_two_ranks_breaks_the_group(start_group: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_group(Worker, 2) as group:

        def interrupted(*_: Any, **__: Any) -> Any:
            def call() -> Any:
                raise KeyboardInterrupt

            return call

        monkeypatch.setattr(group.workers[1], "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask_all(group, "rank")
        monkeypatch.undo()
        with pytest.raises(StateError, match=r"call restart\(\)"):
            ask_all(group, "rank")


def test_collectives_in_constructors_and_closes_do_not_cross_those_of_another_engine(join_group: Start) -> None:
    is_over = threading.Event()
    sums: list[Any] = []

    def work(group: WorkerGroup) -> None:
        while not is_over.is_set():
            sums.extend(ask_all(group, "add_up"))

    with join_group(Worker, 2) as steady:
        thread = threading.Thread(target=work, args=(steady,))
        thread.start()
        try:
            for _ in range(4):
                with join_group(AddsUpAtStartAndEnd, 2) as other:
                    assert ask_all(other, "add_up") == [2.0, 2.0]
        finally:
            is_over.set()
            thread.join()
    assert set(sums) == {2.0}


@pytest.mark.slow
def test_a_call_behind_another_engines_waits_and_a_late_one_is_named(start_group: Start, wait_until: Any) -> None:
    with start_group(Worker, engine="the long") as long, start_group(Worker, engine="the short") as short:
        short._timeout_s = 2.0
        thread = threading.Thread(target=ask_all, args=(long, "nap", 3.0))
        thread.start()
        wait_until(lambda: long.workers[0].current)
        assert ask_all(short, "rank") == [0]
        thread.join()
        long._timeout_s = 0.5
        errors: list[Exception] = []

        def call_late() -> None:
            try:
                ask_all(long, "nap", 300.0)
            except (WorkerTimeoutError, WorkerDiedError) as error:
                errors.append(error)

        thread = threading.Thread(target=call_late)
        thread.start()
        wait_until(lambda: long.workers[0].current)
        with pytest.raises((WorkerTimeoutError, WorkerDiedError), match=r"nap\(\) did not end within 0.5 s"):
            ask_all(short, "rank")
        thread.join()
        assert errors


# ---------------------------------------------------------------------------------------------- out of descriptors


@pytest.mark.slow
def test_a_worker_without_descriptors_is_an_error_at_once(start_group: Start) -> None:
    with start_group(Worker) as group:
        ask_all(group, "limit_descriptors")
        started = time.monotonic()
        with pytest.raises(Exception, match="Too many open files"):
            ask_all(group, "large")
        assert ask_all(group, "rank") == [0]
        with pytest.raises(WorkerDiedError):
            ask_all(group, "sum_of", torch.ones(100_000))
        assert time.monotonic() - started < 50, "no deadline came: a group's call has 100 s"


@pytest.mark.slow
def test_a_user_without_descriptors_gets_an_error_and_not_a_hang(tmp_path: Path) -> None:
    done = run(
        """
        ask("rank")
        limit = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 1024))
        try:
            ask("large")
        except Exception as error:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
            print(type(error).__name__, error)
        """,
        tmp_path,
    )
    assert "WorkerDiedError" in done.stdout, done
    assert "its answer could not be received: OSError: [Errno 24]" in done.stdout


# ------------------------------------------------------------------------------------------------ forks and endings

PROGRAM = """
import gc, os, resource, signal, sys, time
import torch
from rlcore.engines.launchers.launch import start_workers
from rlcore.errors import StateError

class Worker:
    def __init__(self, context): self.context = context
    def rank(self): return self.context.rank
    def large(self): return torch.zeros(100_000)
    def close(self): pass

group = start_workers(Worker, "the engine", ["cpu:0"], launcher="process", timeout_s=100)
def ask(method): return group.call(method, [((), {})])
"""


def run(code: str, runtime: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    import textwrap

    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM + textwrap.dedent(code)],
        env=os.environ | {"RLCORE_RUNTIME": str(runtime), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **options,
    )


@pytest.mark.slow
def test_a_fork_that_uses_its_parents_engine_is_told_and_harms_nothing_and_may_have_its_own(tmp_path: Path) -> None:
    done = run(
        """
        if os.fork() == 0:
            try:
                ask("rank")
            except StateError as error:
                print(error, flush=True)
            group.stop()
            group = start_workers(Worker, "the engine", ["cpu:0"], launcher="process", timeout_s=100)
            print(ask("rank"), flush=True)
            group.stop()
            sys.exit(0)
        os.wait()
        print(ask("rank"), len(os.listdir(os.environ["RLCORE_RUNTIME"])))
        """,
        tmp_path,
    )
    refusal, own, answer = done.stdout.splitlines()
    assert refusal.startswith("rank() is refused: the workers of the engine belong to process ")
    assert refusal.endswith("of which this one is a fork; build an engine here")
    assert own == "[0]", done.stderr
    assert answer == "[0] 2", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_program_that_closes_nothing_leaves_no_file(tmp_path: Path, end: str, wait_until: Any) -> None:
    run(f"ask('rank')\n{end}", tmp_path)
    wait_until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.slow
def test_a_dropped_group_ends_its_workers(wait_until: Any) -> None:
    group = start_workers(Worker, "the engine", ["cpu:0"], launcher="process", timeout_s=100.0)
    pid, store = group.workers[0].process_id, Path(group.store)
    assert store.exists()
    ask_all(group, "rank")
    del group
    gc.collect()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert not store.exists()


# ---------------------------------------------------------------------------------------------------------- printing


def test_printing_costs_no_more_the_more_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_WINDOW_S", math.inf)  # a slow machine forgets none either
    lines: list[str] = []

    class Sink:
        def write(self, text: str) -> None:
            lines.append(text)

        def flush(self) -> None:
            pass

    merger = LogMerger(Sink)  # type: ignore[arg-type]

    def seconds_of(number: int) -> float:
        started = time.thread_time()
        for _ in range(number):
            merger.line("0 cpu:0", f"line {len(lines)}")
        return time.thread_time() - started

    seconds_of(1_000)
    spent = [(seconds_of(1_000), seconds_of(10_000)) for _ in range(3)]
    assert len(lines) == 34_000
    few, many = map(min, zip(*spent, strict=True))  # a collection of garbage may come to any, and not to all
    assert many < 40 * max(few, 0.002), "ten times the lines"


def test_a_long_line_is_cut(capfd: pytest.CaptureFixture[str]) -> None:
    from rlcore.engines.launchers.logs import _LONGEST_LINE, LogForwarder

    code = f"print('x' * {3 * _LONGEST_LINE + 5}, end='', flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        LogForwarder(process, lambda: "0 cpu:0").join(100)
    said = capfd.readouterr().err.splitlines()
    assert sum(line.count("x") for line in said) == 3 * _LONGEST_LINE + 5
    assert len(said) == 4
