"""The end of one of vLLM's processes is found and named; nothing here needs vLLM, as other processes play its part."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.replica import worker_processes
from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses
from rlcore.engines.sampling.vllm.worker_processes import vllm_processes
from rlcore.errors import StateError, WorkerDiedError
from rlcore.process.memory_kills import MemoryKills


class Process:
    """A process with the members of ``multiprocessing.Process``; a real one would fork this process's threads."""

    def __init__(self, name: str, *command: str) -> None:
        self._popen = subprocess.Popen(command)
        self.name, self.pid, self.kill = name, self._popen.pid, self._popen.kill
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def join(self, timeout_s: float = 60.0) -> None:
        self._popen.wait(timeout_s)

    def close(self) -> None:
        self.kill()
        self.join()
        os.close(self.sentinel)


StartAll = Callable[..., tuple[WorkerProcesses, list[Process]]]


@pytest.fixture
def start_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartAll]:
    """``start_all(name, name)``: processes that wait, watched from before they start. No other child counts."""
    started: list[Process] = []
    watching: list[WorkerProcesses] = []
    monkeypatch.setattr(worker_processes, "active_children", lambda: list(started))
    monkeypatch.setattr(worker_processes, "_NEWS_S", 60.0)

    def start(*names: str, num_devices: int = 2) -> tuple[WorkerProcesses, list[Process]]:
        watched = vllm_processes(context(num_devices))
        watching.extend([watched] * (num_devices > 1))
        started.extend(Process(name, "sleep", "600") for name in names)
        return watched, started

    yield start
    for process in started:
        process.kill()
    for watched in watching:  # none is to see the next test's
        watched._watching.join(60)
    for process in started:
        process.close()


def context(num_devices: int) -> WorkerContext:
    devices = tuple(f"cpu:{number}" for number in range(4, 4 + num_devices))
    return WorkerContext("the inference engine", 3, 4, devices[0], 1, devices)


def ask(watched: WorkerProcesses, error: Exception) -> None:
    """Answer as vLLM does when it has lost a process."""
    with watched.needed_for("generate"):
        raise error


def test_the_first_that_ended_is_named_with_its_signal_and_its_device(
    start_all: StartAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryKills, "explanation", lambda _: "sent by somebody")
    watched, (_, second) = start_all("VllmWorker-0", "VllmWorker-1")
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        ask(watched, RuntimeError("cancelled"))
    assert str(caught.value) == (
        f"the worker of rank 3 (cpu:4) lost vLLM's VllmWorker-1 (process {second.pid}, tensor-parallel rank 1, cpu:5), "
        "which was killed by SIGKILL (sent by somebody), during generate()"
    )
    assert (caught.value.rank, caught.value.device, caught.value.method) == (3, "cpu:4", "generate")
    assert str(caught.value.__cause__) == "cancelled"
    with pytest.raises(StateError, match="ours"):
        ask(watched, StateError("ours"))


def test_the_others_do_not_wait_for_the_lost_one(start_all: StartAll) -> None:
    _, (first, second) = start_all("VllmWorker-0", "VllmWorker-1")
    second.kill()
    first.join()
    assert first.exitcode == -signal.SIGKILL


def test_what_they_shared_is_gone_before_anybody_is_told(start_all: StartAll) -> None:
    """Else this process may be ended before it has removed that."""
    seen: list[tuple[bool, list[int | None]]] = []
    watched, processes = start_all("VllmWorker-0", "VllmWorker-1")
    watched._clean_up = lambda: seen.append((watched.is_lost, [process.exitcode for process in processes]))
    processes[0].kill()
    watched._watching.join(60)
    assert seen == [(False, [-signal.SIGKILL] * 2)]
    assert watched.is_lost


def test_what_names_them_is_there_until_all_have_been_looked_at(start_all: StartAll) -> None:
    """A scheduler that fails during build() ends at the same time as the executor is closed."""
    begun, told = threading.Event(), threading.Event()
    watched, (process, _) = start_all("VllmWorker-0", "VllmWorker-1")
    name = watched._name

    def slow_name(ended: Any) -> str:
        begun.set()
        time.sleep(0.2)
        told.set()
        return name(ended)

    watched._name = slow_name
    process.kill()
    assert begun.wait(60)
    watched.end()
    assert told.is_set()


def test_none_is_waited_for_when_none_has_started(start_all: StartAll) -> None:
    watched, _ = start_all()
    watched.end()
    assert not watched._watching.is_alive()


def test_an_error_that_comes_before_the_news_of_the_end_waits_for_it(start_all: StartAll) -> None:
    watched, (process, _) = start_all("Another-0", "VllmWorker-1")
    killer = threading.Timer(0.2, os.kill, (process.pid, signal.SIGUSR2))
    killer.start()
    with pytest.raises(
        WorkerDiedError, match=rf"vLLM's Another-0 \(process {process.pid}\), which was killed by SIGUSR2,"
    ):
        ask(watched, ConnectionError("reset by peer"))
    killer.join()


def test_what_comes_of_nobodys_end_stays_as_it_is(start_all: StartAll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "_NEWS_S", 0.05)
    watched, _ = start_all("VllmWorker-0", "VllmWorker-1")
    with pytest.raises(ValueError, match="of vLLM"):
        ask(watched, ValueError("of vLLM"))


def test_one_that_ends_while_others_are_still_to_start_is_seen(start_all: StartAll) -> None:
    watched, processes = start_all("VllmWorker-0")
    processes.append(Process("VllmWorker-1", "sh", "-c", "exit 3"))
    with pytest.raises(WorkerDiedError, match=r"VllmWorker-1 .*cpu:5\), which ended with exit code 3, during generate"):
        ask(watched, RuntimeError("WorkerProc initialization failed"))


def test_who_ends_in_order_has_told_vllm_why(start_all: StartAll) -> None:
    watched, processes = start_all("VllmWorker-0")
    processes.append(Process("VllmWorker-1", "true"))
    with pytest.raises(RuntimeError, match="no such load format"):
        ask(watched, RuntimeError("no such load format"))


def test_a_replica_on_one_device_has_no_process_to_lose(start_all: StartAll) -> None:
    watched, (other,) = start_all("somebody's", num_devices=1)
    other.kill()
    other.join()
    with pytest.raises(RuntimeError, match="out of memory"):
        ask(watched, RuntimeError("out of memory"))
