"""Workers on a host of a Ray cluster that fail or end, and a host that is lost: one error, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.errors import DeviceError, InvalidInputError, StateError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rlcore.process.status import start_time
from tests.engines.ask import ask_all
from tests.engines.launchers.conftest import processes_named_in
from tests.warm import LIMIT_S

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file

SOON_S = 45.0
"""On however busy a machine; the heartbeat's own deadlines are 12 to 15 s, and a call has 100 s."""


class Worker:
    def __init__(self, context: Any) -> None:
        self.context = context

    def where(self) -> str:
        return str(self.context.where)

    def echo(self, value: Any) -> Any:
        return value

    def length(self, tensor: torch.Tensor) -> int:
        tensor += 1
        return int(tensor.sum())

    def fail(self) -> None:
        raise KeyError("planted")

    def sleep_in_a_function(self, seconds: float) -> None:
        time.sleep(seconds)

    def end(self, rank: int, how: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), how)
        time.sleep(300)

    def tell(self) -> None:
        self.context.emit({"rank": self.context.rank, "tensor": torch.ones(2)})
        print("a line of a worker")

    def close(self) -> None:
        pass


@pytest.fixture
def pair(ray_host: str) -> Iterator[WorkerGroup]:
    names = [f"{ray_host}/cpu:0", f"{ray_host}/cpu:1"]
    group = start_workers(Worker, "the test engine", names, launcher="ray", timeout_s=100)
    yield group
    group.stop()


def works(host: str) -> bool:
    """Whether workers can be started on the host, and answer."""
    group = start_workers(Worker, "the next engine", [f"{host}/cpu:0"], launcher="ray", timeout_s=100)
    try:
        return ask_all(group, "echo", 7) == [7]
    finally:
        group.stop()


def agent_pid(host: str) -> int:
    from rlcore.engines.launchers.ray.cluster import connect

    return connect().link(host).facts.pid


@pytest.mark.slow
def test_calls_carry_tensors_events_and_lines(pair: WorkerGroup, ray_host: str, capfd: Any) -> None:
    assert ask_all(pair, "where")[1] == f"rank 1 ({ray_host}/cpu:1) of the test engine"
    for numel in (3, 1 << 18):  # in the message, and beside it
        given = torch.arange(numel)
        (back, _) = ask_all(pair, "echo", {"a": (given, [1.5, "x", b"y"])})
        assert torch.equal(back["a"][0], given) and back["a"][1] == [1.5, "x", b"y"]
        back["a"][0].add_(1)  # an answer is the user's own
        assert ask_all(pair, "length", given) == [int(given.sum()) + numel] * 2
        assert int(given.sum()) == numel * (numel - 1) // 2, "the caller's tensor is left alone"
    events: list[Any] = []
    pair.call("tell", [((), {})] * 2, on_event=events.append)
    assert sorted(event["rank"] for event in events) == [0, 1]
    pair.stop()
    assert "a line of a worker" in capfd.readouterr().err


@pytest.mark.slow
def test_calls_run_in_the_order_in_which_they_were_made(pair: WorkerGroup) -> None:
    (worker, _) = pair.workers
    large = torch.zeros(1 << 20)  # Ray resolves it before it sends the call, and others overtake
    futures = [worker.call("echo", (index, large if index % 2 else None)) for index in range(20)]
    done: list[int] = []
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: done.append(index))
    assert [future.result(SOON_S)[0] for future in futures] == list(range(20))
    assert done == sorted(done)


@pytest.mark.slow
def test_an_exception_arrives_with_rank_host_and_traceback(pair: WorkerGroup, ray_host: str) -> None:
    with pytest.raises(WorkerError, match=rf"fail\(\) failed on rank 0 \({ray_host}/cpu:0\): KeyError") as caught:
        ask_all(pair, "fail")
    assert 'raise KeyError("planted")' in caught.value.traceback
    assert ask_all(pair, "echo", 1) == [1, 1], "the workers live"
    with pytest.raises(InvalidInputError, match="cannot be sent to a worker process"):
        ask_all(pair, "echo", threading.Lock())


def test_a_deadline_shows_the_stack(pair: WorkerGroup) -> None:
    with pytest.raises(WorkerTimeoutError, match=r"did not end within 2 s on rank 0 .*sleep_in_a_function") as caught:
        pair.call("sleep_in_a_function", [((300,), {})] * 2, timeout_s=2)
    assert "in sleep_in_a_function" in caught.value.traceback
    with pytest.raises(StateError, match=r"call restart\(\)"):
        ask_all(pair, "echo", 1)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_a_worker_that_ends_or_stops_is_named(
    how: signal.Signals, pair: WorkerGroup, ray_host: str, wait_until: Callable[..., None]
) -> None:
    pids, began = [worker.process_id for worker in pair.workers], time.monotonic()
    with pytest.raises((WorkerDiedError, WorkerTimeoutError)) as caught:
        pair.call("end", [((1, how), {})] * 2, timeout_s=8)
    assert time.monotonic() - began < SOON_S
    assert f"rank 1 ({ray_host}/cpu:1)" in str(caught.value)
    assert ("was killed by SIGKILL" if how == signal.SIGKILL else "is stopped (SIGSTOP)") in str(caught.value)
    wait_until(lambda: not any(map(start_time, pids)))
    assert works(ray_host)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_agent_that_ends_or_stops_is_a_lost_host(
    how: signal.Signals, pair: WorkerGroup, ray_host: str, wait_until: Callable[..., None]
) -> None:
    pids, agent = [worker.process_id for worker in pair.workers], agent_pid(ray_host)
    threading.Timer(0.5, os.kill, (agent, how)).start()
    began = time.monotonic()
    with pytest.raises(
        WorkerDiedError, match=rf"rank 0 \({ray_host}/cpu:0\) was lost with its host {ray_host}"
    ) as lost:
        ask_all(pair, "sleep_in_a_function", 300)
    assert time.monotonic() - began < SOON_S
    assert ("it did not answer for 12 s" in str(lost.value)) == (how == signal.SIGSTOP)
    assert any("rank 1 failed too" in note for note in lost.value.__notes__)
    wait_until(lambda: not any(map(start_time, [agent, *pids])))
    assert works(ray_host), "another agent was started"
    assert agent_pid(ray_host) != agent


PROGRAM = """
    import sys, time
    import rlcore
    from rlcore.engines.launchers.launch import start_workers

    class Worker:
        def __init__(self, context): pass
        def nap(self): time.sleep(600)
        def close(self): pass

    if __name__ == "__main__":
        rlcore.init(launcher="ray")
        from rlcore.engines.launchers.ray.cluster import connect
        host = connect().hosts()[0].name
        group = start_workers(Worker, "e", [f"{host}/cpu:0", f"{host}/cpu:1"], launcher="ray", timeout_s=600)
        print("started", *[worker.process_id for worker in group.workers], flush=True)
        group.call("nap", [((), {})] * 2)
"""


@pytest.mark.parametrize(
    "how",
    [pytest.param([signal.SIGKILL], marks=pytest.mark.slow), [signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGTERM]],
)
def test_nothing_is_left_of_a_program_that_ends(how: list[signal.Signals], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    runtime = tmp_path / "run"
    environment = os.environ | {"RLCORE_RUNTIME": str(runtime), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        started, *pids = process.stdout.readline().split()
        assert started == "started" and set(map(int, pids)) <= set(processes_named_in(str(runtime)))
        for number in how:  # Ctrl-C twice: a second apart, as it is pressed
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        process.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while left := processes_named_in(str(runtime)):  # those of Ray too: they inherit the variable
        assert time.monotonic() < deadline, f"left: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in left]}"
        time.sleep(0.1)
    assert not list(runtime.glob("worker-*"))


def test_workers_end_when_their_program_is_silent(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = os.environ | {"RLCORE_RUNTIME": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        _, *pids = process.stdout.readline().split()
        try:
            process.send_signal(signal.SIGSTOP)  # to its hosts as one that is cut off
            wait_until(lambda: not any(start_time(int(pid)) for pid in pids))
        finally:
            process.kill()


@pytest.mark.slow
def test_a_host_that_is_not_there_is_named(ray_host: str) -> None:
    with pytest.raises(DeviceError, match=f"the cluster has no host 'elsewhere' any more; it has {ray_host}"):
        start_workers(Worker, "e", ["elsewhere/cpu:0"], launcher="ray", timeout_s=10)
    with pytest.raises(InvalidInputError, match=r"takes devices with their host, such as '.*/cpu:0', got 'cpu:0'"):
        start_workers(Worker, "e", ["cpu:0"], launcher="ray", timeout_s=10)
