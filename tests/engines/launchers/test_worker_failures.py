"""Workers that die, hang or stop, alone and in collectives: one error, soon, and nothing is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from rlcore.engines.launchers import group as group_module
from rlcore.engines.launchers import worker_process as worker_process_module
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.running import announce
from rlcore.engines.launchers.runtime_files import new_store, record_name
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import StateError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rlcore.process.endings import how_it_ended
from rlcore.process.memory_kills import MemoryKills
from rlcore.process.runtime_folder import runtime_folder
from rlcore.process.socket_address import socket_address
from rlcore.process.status import maker_of_shared_memory, pid_namespace, state_of
from rlcore.registry import get_device
from tests.engines.ask import ask_all

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file

DEADLINE_S = 4.0
"""Of a call that is to miss it: a worker that is there has begun with it by then, and answered one of no work."""
SOON_S = 25.0
"""On however busy a machine, and before any other deadline: a group's call has 100 s, a collective 60."""


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def rank(self) -> int:
        return self.context.rank

    def export(self) -> None:
        self.exported = torch.zeros(4)
        get_device("cpu").memory.export_ipc(self.exported)

    def die(self, how: str) -> None:
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "SIGSEGV":
            ctypes.string_at(0)
        if how == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "exit":
            os._exit(3)
        time.sleep(300)

    def fill_memory(self, what: str, argument: torch.Tensor) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
        try:
            self.filled = bytearray(1 << 30) if what == "bytes" else torch.empty(1 << 30, dtype=torch.uint8)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def join_group(self, group: str) -> None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))

    def fill_group(self) -> int:
        return len(bytearray(1 << 28))

    def close_descriptors(self, first: int) -> None:
        os.closerange(first, 1024)

    def sleep_in_a_function(self, seconds: float) -> None:
        time.sleep(seconds)

    def loop_in_c(self) -> None:
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter lock for hours

    def hang_on(self, rank: int) -> None:
        if self.context.rank == rank:
            self.sleep_in_a_function(300)

    def reduce_but(self, rank: int, how: str) -> None:
        """A collective that one rank does not reach."""
        group = self.context.process_group(60.0)
        if self.context.rank == rank:
            if how == "raise":
                raise KeyError("planted")
            self.die(how)
        torch.distributed.all_reduce(torch.zeros(1), group=group)

    def wait_for_a_rank_that_failed(self) -> None:
        if self.context.rank == 1:
            raise KeyError("planted")
        time.sleep(300)

    def fail_on(self, rank: int) -> None:
        if self.context.rank == rank:
            raise KeyError("planted")
        while not self.context.is_cancelled():
            time.sleep(0.01)
        raise StateError("ended early")

    def spawn(self) -> int:
        """Process id of a descendant that holds this process's socket and output."""
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        return child

    def spawn_and_die(self) -> None:
        self.spawn()
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass


class Clinging(Worker):
    def close(self) -> None:
        time.sleep(300)


class Failing(Worker):
    def close(self) -> None:
        raise OSError("the disk is full")


Start = Any


@contextlib.contextmanager
def ending_soon() -> Iterator[None]:
    """What is done within must not wait for a deadline."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_S


@pytest.fixture
def _endless_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits it out is not there soon."""
    monkeypatch.setattr(group_module, "_GRACE_S", 300.0)


class Counters:
    """Files like the kernel's, in which the counts of kills stand."""

    def __init__(self, folder: Path) -> None:
        self.group = folder / "box"
        self.group.mkdir()
        (folder / "membership").write_text("0::/box\n")
        (self.group / "memory.max").write_text("1000\n")
        self.set(3)
        self.kills = MemoryKills(folder / "membership", folder, folder / "absent")

    def set(self, num_kills: int) -> None:
        (self.group / "memory.events").write_text(f"oom 9\noom_kill {num_kills}\noom_group_kill 0\n")


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counters:
    """The counters that workers that start now read."""
    made = Counters(tmp_path)
    monkeypatch.setattr(worker_process_module, "MemoryKills", lambda membership: made.kills)
    return made


@pytest.mark.usefixtures("_endless_grace")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("SIGKILL", r"was killed by SIGKILL \(sent by somebody: the kernel has counted no kill .*\)"),
        pytest.param("SIGSEGV", "was killed by SIGSEGV", marks=pytest.mark.slow),
        pytest.param("exit", "ended with exit code 3", marks=pytest.mark.slow),
    ],
)
def test_a_death_is_noticed_and_named(start_group: Start, counters: Counters, how: str, text: str) -> None:
    hows = [how, "sleep"] if how == "SIGKILL" else [how]  # of one that is not alone
    with start_group(Worker, len(hows)) as group:
        died = rf"^the worker of rank 0 \(cpu:0\) {text} during die\(\)"
        with ending_soon(), pytest.raises(WorkerDiedError, match=died) as caught:
            group.call("die", [((one,), {}) for one in hows])
        assert (caught.value.rank, caught.value.device, caught.value.method) == (0, "cpu:0", "die")
        if how == "SIGSEGV":
            assert "in die" in caught.value.traceback, "the stack at the crash"
        ended = rf"rank\(\) is refused: the workers were ended after an earlier failure \({died[1:]}\); call restart"
        with pytest.raises(StateError, match=ended):
            ask_all(group, "rank")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (-signal.SIGABRT, "was killed by SIGABRT"),
        (-40, "was killed by signal 40"),  # a real-time signal
    ],
)
def test_an_end_is_told_by_its_code(code: int, text: str) -> None:
    assert how_it_ended(code) == text


@pytest.mark.slow
def test_a_kill_for_want_of_memory_is_told_by_the_counters(start_group: Start, counters: Counters) -> None:
    with start_group(Worker) as group:
        counters.set(4)
        text = rf"by the kernel for want of memory: the control group {counters.group}, whose limit is 1000 bytes,"
        with pytest.raises(WorkerDiedError, match=text):
            ask_all(group, "die", "SIGKILL")


@pytest.mark.slow
def test_a_real_kill_for_want_of_memory_is_told(start_group: Start, limited_group: Path) -> None:
    with start_group(Worker) as group:
        ask_all(group, "join_group", str(limited_group))
        process = group.workers[0]._process
        process._kills = MemoryKills(Path(f"/proc/{process.pid}/cgroup"))  # as if it had started there
        text = rf"for want of memory: the control group {limited_group}, whose limit is \d+ bytes, counts 1 such"
        with pytest.raises(WorkerDiedError, match=text):
            ask_all(group, "fill_group")


@pytest.mark.parametrize("first", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_worker_whose_descriptors_something_closes_says_so(start_group: Start, first: int) -> None:
    with start_group(Worker) as group:
        lost = r"ended with exit code 89, which says that it lost the connection .* closed file descriptors"
        with ending_soon(), pytest.raises(WorkerDiedError, match=lost):
            ask_all(group, "close_descriptors", first)


@pytest.mark.parametrize(
    ("what", "error", "asked"),
    [
        ("bytes", "MemoryError", r"Memory was asked for, and the error does not say how much\."),
        ("tensor", "RuntimeError: .*DefaultCPUAllocator: can't allocate memory", rf"{1 << 30} bytes were asked for\."),
    ],
)
def test_want_of_memory_is_an_error_that_says_who_has_it_and_the_worker_goes_on(
    join_group: Start, what: str, error: str, asked: str
) -> None:
    with join_group(Worker) as group:
        text = (
            rf"(?s)^fill_memory\(\) failed on rank 0 \(cpu:4\): {error}.*\n\n{asked} This process has \d+ bytes of the "
            r"host's memory \(resident\)\. .*cpu:4 has \d+ bytes free of \d+\. Held by rlcore here, in bytes: "
            r".*tensors of calls, shared between two processes \d+"
        )
        with pytest.raises(WorkerError, match=text):
            group.call("fill_memory", [((what, torch.zeros(100_000)), {})])
        assert ask_all(group, "rank") == [0]


@pytest.mark.slow
def test_a_death_between_calls_is_named_by_the_next(start_group: Start, wait_until: Any) -> None:
    with start_group(Worker) as group:
        process = group.workers[0].process_id
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: group.workers[0]._process._is_gone)  # its parent has heard of it
        with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL .* before rank\(\)"):
            ask_all(group, "rank")


@pytest.mark.slow
def test_a_death_is_noticed_though_a_descendant_holds_the_socket(start_group: Start, wait_until: Any) -> None:
    with start_group(Worker) as group:
        (descendant,) = ask_all(group, "spawn")
        with ending_soon(), pytest.raises(WorkerDiedError):
            ask_all(group, "spawn_and_die")
    wait_until(lambda: not is_running(descendant))


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_worker_that_exported_memory_leaves_no_socket(
    start_group: Start, end: str, runtime_folder: Path, wait_until: Any
) -> None:
    with start_group(Worker) as group:
        ask_all(group, "export")
        pid = group.workers[0].process_id
        assert list(runtime_folder.glob(f"ipc-{pid}-*.sock"))
        if end == "kill":
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not list(runtime_folder.glob(f"ipc-{pid}-*.sock")))


# ----------------------------------------------------------------------------------------------------- hanging


@pytest.mark.parametrize("method", ["sleep_in_a_function", pytest.param("loop_in_c", marks=pytest.mark.slow)])
def test_a_hang_meets_its_deadline_with_the_stack(start_group: Start, method: str) -> None:
    with start_group(Worker) as group:
        group._timeout_s = DEADLINE_S
        late = rf"^{method}\(\) did not end within 4 s on rank 0"
        with ending_soon(), pytest.raises(WorkerTimeoutError, match=late) as caught:
            ask_all(group, method, *([300] if method == "sleep_in_a_function" else []))
        assert f"in {method}" in str(caught.value)
        assert "in _listen" not in str(caught.value), "another thread: looking at it while it runs can crash the worker"
        with pytest.raises(StateError, match="call restart"):
            ask_all(group, "rank")


@pytest.mark.slow
def test_of_two_workers_the_one_that_hangs_is_named(start_group: Start) -> None:
    with start_group(Worker, 2) as group:
        group._timeout_s = DEADLINE_S
        with pytest.raises(WorkerTimeoutError, match=r"on rank 1 \(cpu:1\)") as caught:
            ask_all(group, "hang_on", 1)
        assert "in sleep_in_a_function" in str(caught.value)
        assert "rank 1 (cpu:1) of the test engine" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGSTOP", r"is stopped \(SIGSTOP\)"),
        pytest.param("sleep", r"is in die \(test_worker_failures\.py\)", marks=pytest.mark.slow),
    ],
)
def test_a_timeout_blames_the_worker_that_the_others_wait_for_in_a_collective(
    start_group: Start, how: str, words: str
) -> None:
    with start_group(Worker, 2) as group:
        group._timeout_s = DEADLINE_S
        late = r"^reduce_but\(\) did not end within 4 s on rank 1 \(cpu:1\)"
        with pytest.raises(WorkerTimeoutError, match=late) as caught:
            ask_all(group, "reduce_but", 1, how)
        assert caught.value.rank == 1
        first, second = caught.value.__notes__[:2]
        assert re.fullmatch(r"rank 0 \(cpu:0\) of the test engine is in a collective \(all_reduce\)", first)
        assert re.fullmatch(rf"rank 1 \(cpu:1\) of the test engine {words}", second)
        assert "in all_reduce" in str(caught.value), "the stacks of all are there"


def stop(process: int, wait_until: Any) -> None:
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: state_of(process) == "T")


@pytest.mark.slow
def test_a_worker_that_hangs_in_its_start_shows_its_stack(start_group: Start) -> None:
    class Slow(Worker):
        def __init__(self, context: WorkerContext) -> None:
            time.sleep(300)

    with (
        start_group(Worker),  # the process is there, and has imported what takes long
        pytest.raises(WorkerTimeoutError, match=r"start\(\) did not end within 6 s on rank 0") as caught,
        start_group(Slow, timeout_s=6.0),  # in which it reaches __init__ on a busy machine, too
    ):
        pass
    assert "in __init__" in str(caught.value)


def test_a_stopped_worker_is_said_to_be_stopped_and_who_sends_to_it_does_not_wait(
    start_group: Start, wait_until: Any
) -> None:
    with start_group(Worker) as group:
        group._timeout_s = 1.0
        stop(group.workers[0].process_id, wait_until)
        arguments = [torch.zeros(1_000_000), "x" * 10_000_000]
        with ending_soon():
            futures = [group.workers[0].prepare("rank", [arguments], {}, timeout_s=1.0)() for _ in range(3)]
            with pytest.raises(WorkerTimeoutError, match=r"the process is stopped \(SIGSTOP\)"):
                ask_all(group, "rank")
        assert all(isinstance(future.exception(60), WorkerDiedError) for future in futures)


@pytest.mark.parametrize("ends_stopped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_call_before_the_end_does_not_wait_for_a_stopped_worker(
    start_group: Start, monkeypatch: pytest.MonkeyPatch, wait_until: Any, ends_stopped: bool
) -> None:
    with start_group(Worker) as group:
        monkeypatch.setattr(group_module, "STOP_S", 0.6)
        group._timeout_s = 100.0 if ends_stopped else 3.0
        stop(group.workers[0].process_id, wait_until)
        late = (
            rf"^rank\(\) did not end within {0.6 if ends_stopped else 3} s on rank 0 .*, which is stopped \(SIGSTOP\);"
        )
        with ending_soon(), pytest.raises(WorkerTimeoutError, match=late):
            group.call("rank", [((), {})], ends_stopped=ends_stopped)


def test_a_call_before_the_end_waits_for_a_worker_that_runs(join_group: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "STOP_S", 0.1)
    with join_group(Worker) as group:
        group.call("sleep_in_a_function", [((1.5,), {})], ends_stopped=True)


# -------------------------------------------------------------------------------------------------- collectives


@pytest.mark.slow
@pytest.mark.usefixtures("_endless_grace")
def test_a_death_in_a_collective_is_the_error_and_not_what_the_others_saw(start_group: Start) -> None:
    died = r"the worker of rank 1 \(cpu:1\)"
    with start_group(Worker, 2) as group, ending_soon(), pytest.raises(WorkerDiedError, match=died):
        ask_all(group, "reduce_but", 1, "SIGKILL")


@pytest.fixture
def grace_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorter than usual."""
    monkeypatch.setattr(group_module, "_GRACE_S", 1.0)
    return 1.0


@pytest.mark.usefixtures("grace_s")
@pytest.mark.slow
def test_an_exception_in_a_collective_is_the_error_and_not_what_the_others_saw(start_group: Start) -> None:
    failed = r"failed on rank 1 \(cpu:1\): KeyError: 'planted'"
    with start_group(Worker, 2) as group, ending_soon(), pytest.raises(WorkerError, match=failed):
        ask_all(group, "reduce_but", 1, "raise")


@pytest.mark.slow
def test_workers_that_wait_for_one_that_failed_are_ended_after_the_grace(start_group: Start, grace_s: float) -> None:
    with start_group(Worker, 2) as group:
        started = time.monotonic()
        with ending_soon(), pytest.raises(WorkerError, match="KeyError: 'planted'") as caught:
            ask_all(group, "wait_for_a_rank_that_failed")
        assert time.monotonic() - started > grace_s
        assert "the executor's workers were ended; restart() brings them back" in caught.value.__notes__
        with pytest.raises(StateError):
            ask_all(group, "rank")


@pytest.mark.usefixtures("_endless_grace")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_that_failed_on_one_rank_is_given_up_on_the_others(join_group: Start, rank: int) -> None:
    with join_group(Worker, 2) as group:
        failed = rf"failed on rank {rank} \(cpu:{4 + rank}\): KeyError: 'planted'"
        with ending_soon(), pytest.raises(WorkerError, match=failed) as caught:
            ask_all(group, "fail_on", rank)
        assert caught.value.__notes__ == [f"rank {1 - rank} failed too: ended early"]
        assert ask_all(group, "rank") == [0, 1], "the group goes on"


# ------------------------------------------------------------------------------------------------------- ending


@pytest.fixture
def _patient_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is killed because the machine is busy."""
    monkeypatch.setattr(group_module, "STOP_S", 60.0)


@pytest.mark.parametrize("end", ["stop", pytest.param("kill", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_patient_stop", "join_group")  # what this process makes once for all workers is there
def test_an_ended_group_leaves_nothing_and_a_failing_close_is_logged(
    start_group: Start, holdings: Any, wait_until: Any, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    before = holdings()
    with start_group(Failing) as group:
        ask_all(group, "rank")
        during = holdings()
        assert len(during["processes"]) - len(before["processes"]) >= 1
        assert len(during["files"]) - len(before["files"]) == 2, "a record and a store"
        if end == "kill":
            group.kill("the test says so")
    wait_until(lambda: holdings() == before)
    told = "close() failed on rank 0 (cpu:0) of the test engine: "
    assert (told in caplog.text and "OSError: the disk is full" in caplog.text) == (end == "stop")


@pytest.mark.slow
def test_an_engine_that_loses_its_process_to_another_is_told_why(start_group: Start) -> None:
    with start_group(Worker, engine="the reader") as reader, start_group(Worker, engine="the culprit") as culprit:
        with pytest.raises(WorkerDiedError):
            ask_all(culprit, "die", "exit")
        with pytest.raises(WorkerDiedError, match=r"ended because the culprit failed: .* with exit code 3 during die"):
            ask_all(reader, "rank")
    with start_group(Worker, engine="the reader") as reader, start_group(Worker, engine="the culprit") as culprit:
        culprit._timeout_s = 0.5
        with pytest.raises(WorkerTimeoutError):
            ask_all(culprit, "sleep_in_a_function", 300)
        with pytest.raises(WorkerDiedError, match=r"was ended because the culprit failed: .* did not end within 0.5 s"):
            ask_all(reader, "rank")


@pytest.mark.slow
def test_the_record_of_a_process_that_died_is_not_written_again(
    start_group: Start, runtime_folder: Path, wait_until: Any
) -> None:
    """By the first of two engines to leave it."""
    with start_group(Worker, engine="the reader") as reader, start_group(Worker, engine="the writer"):
        (worker,) = reader.workers
        record = runtime_folder / record_name(worker.process_id)
        assert record.exists()
        os.kill(worker.process_id, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            worker.call("rank").result(60)
        wait_until(lambda: not record.exists())
    assert not record.exists()


@pytest.mark.slow
def test_a_worker_that_does_not_close_is_killed(
    start_group: Start, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setattr(group_module, "STOP_S", 0.5)
    with start_group(Clinging) as group:
        process = group.workers[0].process_id
    wait_until(lambda: not is_running(process))


@pytest.mark.slow
def test_a_new_engine_can_follow_at_once_on_the_same_device(start_group: Start) -> None:
    processes = set()
    for _ in range(2):
        with start_group(Worker) as group:
            processes.add(group.workers[0].process_id)
            assert ask_all(group, "rank") == [0]
    assert len(processes) == 2, "each ended with its last worker"


# -------------------------------------------------------------------------------------- the user's process ends

PARENT = """
import os, re, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
import torch
from rlcore.engines.launchers.launch import start_workers

OPENS = '''
import sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(sys.argv[1])
print(flush=True)
time.sleep(300)
'''

class Worker:
    def __init__(self, context):
        pass
    def start_child(self):
        subprocess.Popen(["sleep", "300"])
    def share(self):
        self.memory = SharedMemory(create=True, size=4096)
        child = subprocess.Popen([sys.executable, "-c", OPENS, self.memory.name], stdout=subprocess.PIPE)
        child.stdout.readline()
        return self.memory.name
    def wait(self, how):
        print("busy", flush=True)
        if how == "loop in C":
            re.match(r"(a+)+$", "a" * 40 + "b")
        time.sleep(300)
    def keep(self, tensor):
        self.tensor = tensor
    def close(self):
        print("closed", flush=True)

def all_of(method, *args):
    return [worker.call(method, *args) for worker in group.workers]

devices = [f"cpu:{index}" for index in range(int(sys.argv[1]))]
group = start_workers(Worker, "the engine", devices, launcher="process", timeout_s=100)
[future.result() for future in all_of("start_child")]
[future.result() for future in all_of("keep", torch.zeros(1_000_000))]
print(*[worker.process_id for worker in group.workers], flush=True)
"""


def run_parent(code: str, runtime: Any, num_workers: int = 1) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT + code, str(num_workers)],
        env=os.environ | {"RLCORE_RUNTIME": str(runtime), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return process, [int(word) for word in line.split()]


def read_until_busy(process: subprocess.Popen[str]) -> None:
    """Until a worker has begun with ``wait``."""
    assert process.stderr is not None
    while "busy" not in (line := process.stderr.readline()):
        assert line, "it ended"


@pytest.mark.slow
def test_memory_shared_by_name_goes_with_those_who_share_it(tmp_path: Path, wait_until: Any) -> None:
    process, workers = run_parent(
        "print(*[one.result() for one in all_of('share')], flush=True); time.sleep(300)", tmp_path, num_workers=2
    )
    with process:
        assert process.stdout is not None
        first, second = [Path("/dev/shm", name) for name in process.stdout.readline().split()]
        assert first.exists() and second.exists()
        os.kill(workers[0], signal.SIGKILL)
        wait_until(lambda: not first.exists())
        assert second.exists()
        process.kill()
        wait_until(lambda: not second.exists())


@pytest.mark.parametrize(
    "state", ["busy", *(pytest.param(one, marks=pytest.mark.slow) for one in ("idle", "loop in C", "stopped"))]
)
def test_all_ends_after_a_kill_of_the_users_process(state: str, tmp_path: Any, living: Any, wait_until: Any) -> None:
    before = set(os.listdir("/dev/shm"))  # perhaps of an ended process of the same number
    busy = "" if state in ("idle", "stopped") else f"all_of('wait', {state!r}); "
    exports = "from rlcore.devices.ipc.socket import listen; listener = listen(); "  # memory of the parent's own
    process, workers = run_parent(f"{exports}{busy}time.sleep(300)", tmp_path)
    with process:
        if busy:
            read_until_busy(process)
        everybody = living(str(tmp_path))
        assert len(everybody) == 4, "parent, worker, its guard and its child"
        if state == "stopped":
            for worker in workers:
                stop(worker, wait_until)
        process.kill()
        wait_until(lambda: living(str(tmp_path)) == [])
    assert not list(tmp_path.iterdir())
    assert not [name for name in {*os.listdir("/dev/shm")} - before if maker_of_shared_memory(name) in everybody]


@pytest.mark.slow
def test_what_even_the_guards_could_not_remove_the_next_look_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, living: Any, wait_until: Any
) -> None:
    from rlcore.engines.launchers.running import running_processes

    process, _ = run_parent("time.sleep(300)", tmp_path)
    with process:
        everybody = living(str(tmp_path))
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        for pid in everybody:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: living(str(tmp_path)) == [])
    assert len(list(tmp_path.iterdir())) == 2, "a record and a store"
    monkeypatch.setenv("RLCORE_RUNTIME", str(tmp_path))
    # One that is just ending is no worker any more, and its record goes when it has ended.
    wait_until(lambda: running_processes() == [] and not list(tmp_path.iterdir()))


def test_what_processes_left_that_were_killed_with_their_guards_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f"store-{pid_namespace()}-{ended.pid}-1-0123abcd").mkdir()
    for name in (f"ipc-{ended.pid}-1.sock", "ipc-of-somebody-else.sock"):
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            socket_address(tmp_path / name) as address,
        ):
            listener.bind(address)
    (tmp_path / record_name(ended.pid)).touch()
    with runtime_folder() as folder:
        announce(folder, os.getpid(), "cpu:0", [])
    living = tmp_path / record_name(os.getpid())
    made = new_store()
    assert set(tmp_path.iterdir()) == {made, living, tmp_path / "ipc-of-somebody-else.sock"}


ENGINE = """
from rlcore.engines.launchers import group as group_module
group_module.STOP_S = {stop_s}
def interrupted():
    try:
        group.call("wait", [(("sleep",), {{}})])
    finally:
        print("stopping", flush=True)
        group.stop()
        print("stopped", flush=True)
interrupted()
"""


@pytest.mark.slow
def test_one_ctrl_c_stops_in_order_and_two_at_once(tmp_path: Any, living: Any, wait_until: Any) -> None:
    for num_presses, stop_s in ((1, 2.0), (2, 100.0)):  # the workers do not close
        process, _ = run_parent(ENGINE.format(stop_s=stop_s), tmp_path)
        with process:
            assert process.stdout is not None and process.stderr is not None
            read_until_busy(process)
            with ending_soon():
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == "stopping\n"
                if num_presses == 2:
                    time.sleep(0.3)
                    process.send_signal(signal.SIGINT)
                assert process.wait(60) == -signal.SIGINT
            assert process.stdout.read() == ("stopped\n" if num_presses == 1 else "")
            errors = process.stderr.read()
            assert "KeyboardInterrupt" in errors
            assert "Exception ignored" not in errors and "Fatal" not in errors
        wait_until(lambda: living(str(tmp_path)) == [])


@pytest.mark.slow
def test_ctrl_c_reaches_the_users_process_alone(tmp_path: Any, living: Any) -> None:
    code = """
try:
    print("waiting", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    pass
[future.result(60) for future in all_of("keep", None)]
group.stop()
"""
    process, workers = run_parent(code, tmp_path)
    with process:
        assert all(os.getpgid(worker) != os.getpgid(process.pid) for worker in workers)
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, process.stderr
        assert process.stderr.read() == "[0 cpu:0] closed\n"


@pytest.mark.slow
def test_threads_of_the_user_can_start_workers_and_end(start_group: Start) -> None:
    """What ends a worker with its parent speaks of the process, not of the thread that started it."""
    groups: list[WorkerGroup] = []
    context = start_group(Worker)
    thread = threading.Thread(target=lambda: groups.append(context.__enter__()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert ask_all(groups[0], "rank") == [0]
    context.__exit__(None, None, None)
