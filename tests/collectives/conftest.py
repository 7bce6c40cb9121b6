"""Real processes that run bodies of tests as the ranks of a group. One set serves all tests; the dead are replaced."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.warm import TorchPopen

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[3])
import atexit
last_acts = []
atexit.register(lambda: [act() for act in last_acts])  # after what is imported later has done its own
import cloudpickle, time, torch, traceback, warnings
from multiprocessing.connection import Connection
from pathlib import Path
from rlcore.collectives.groups import new_group
from rlcore.registry import list_devices
list_devices()  # what else is imported late

class Rank:
    def __init__(self, rank, folder):
        self.rank, self.folder, self._groups = rank, Path(folder), {}
        self.last_acts = last_acts
        self.ends = False  # True: the program ends by itself after this body

    def move_to(self, folder):
        # Another rank was replaced: what was shared with it is over.
        for group in self._groups.values():
            group._error = "a rank was replaced"
            group.destroy()
        self.folder, self._groups = Path(folder), {}

    def new_group(self, device, world_size, name, **options):
        timeout_s = 30.0 if device == "cpu" else 90.0  # NCCL takes ten seconds to start on a cold machine
        options = {"rendezvous": self.folder, "timeout_s": timeout_s} | options
        return new_group(f"{device}:{self.rank}", rank=self.rank, world_size=world_size, name=name, **options)

    def say(self, word):
        (self.folder / word).touch()

    def hear(self, *words):
        # What other ranks say, beside every group.
        deadline = time.monotonic() + 60
        while missing := [word for word in words if not (self.folder / word).exists()]:
            assert time.monotonic() < deadline, f"nobody said {missing}"
            time.sleep(0.01)

    def group(self, device, world_size):
        key = f"shared-{device}-{world_size}"
        if key not in self._groups:
            self._groups[key] = self.new_group(device, world_size, key)
        return self._groups[key]

connection = Connection(int(sys.argv[2]))
connection.send_bytes(cloudpickle.dumps((True, "ready")))
rank = None
while True:
    try:
        body, arguments, number, folder = cloudpickle.loads(connection.recv_bytes())
    except EOFError:
        break
    rank = rank or Rank(number, folder)
    try:
        if str(rank.folder) != folder:
            rank.move_to(folder)
        with warnings.catch_warnings():
            if not torch.cuda.is_available():  # with GPUs torch has advice about NCCL, once each
                warnings.simplefilter("error")
            answer = True, body(rank, *arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    if rank.ends:
        break
    connection.send_bytes(cloudpickle.dumps(answer))
"""

OnRanks = Callable[..., list[Any]]
ANSWER_TIMEOUT_S = 120


class Ranks:
    """Processes by rank, started when they are first needed."""

    def __init__(self, folders: Callable[[], Path]) -> None:
        self._folders = folders
        self._folder = folders()
        self._processes: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def run(
        self, body: Callable[..., Any], world_size: int, *arguments: Any, may_end: tuple[int, ...] = ()
    ) -> list[Any]:
        """``body(rank, *arguments)`` on each rank; what they return, None for one whose process ended."""
        cloudpickle.register_pickle_by_value(sys.modules[body.__module__])
        self._start_missing(world_size)
        for rank, (_, connection) in enumerate(self._processes[:world_size]):
            connection.send_bytes(cloudpickle.dumps((body, arguments, rank, str(self._folder))))
        answers = [self._answer(rank) for rank in range(world_size)]
        failures = [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(answers) if not succeeded]
        ended = {rank for rank, (_, value) in enumerate(answers) if value is EOFError}
        if failures or not ended <= set(may_end):
            self.stop()  # groups that they share may be broken
        for rank in ended & set(range(len(self._processes))):
            self._end(rank)  # its connection has; an interpreter can take longer
        assert not failures, "\n".join(failures)
        assert ended <= set(may_end), f"the processes of ranks {ended} ended"
        return [None if value is EOFError else value for _, value in answers]

    def _start_missing(self, world_size: int) -> None:
        dead = [rank for rank, (process, _) in enumerate(self._processes) if process.poll() is not None]
        if dead:
            self._folder = self._folders()
        new = [*dead, *range(len(self._processes), world_size)]
        for rank in new:
            if rank in dead:
                self._end(rank)
            self._processes[rank : rank + 1] = [self._start()]
        answers = {rank: self._answer(rank) for rank in new}  # or a group would wait for one that imports torch
        if not_started := {rank: answer for rank, answer in answers.items() if answer != (True, "ready")}:
            self.stop()
            raise AssertionError(f"these ranks did not start: {not_started}")

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        import json

        ours, theirs = socket.socketpair()
        with theirs:
            process = TorchPopen(
                [sys.executable, "-c", _PROGRAM, "rank", str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo"},
            )
        return process, Connection(ours.detach())

    def _answer(self, rank: int) -> tuple[bool, Any]:
        _, connection = self._processes[rank]
        if not connection.poll(ANSWER_TIMEOUT_S):
            return False, f"it did not answer within {ANSWER_TIMEOUT_S} s"
        try:
            answer: tuple[bool, Any] = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return True, EOFError
        return answer

    def _end(self, rank: int) -> None:
        process, connection = self._processes[rank]
        connection.close()
        process.kill()
        process.wait()

    def stop(self) -> None:
        for rank in range(len(self._processes)):
            self._end(rank)
        self._processes = []
        self._folder = self._folders()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(lambda: tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


@pytest.fixture
def on_ranks(ranks: Ranks) -> OnRanks:
    """``on_ranks(body, world_size, *arguments)``: what ``body(rank, *arguments)`` returns on each rank."""
    return ranks.run


@pytest.fixture(params=["cpu-3", pytest.param("cuda-2", marks=pytest.mark.multigpu)])
def world(request: pytest.FixtureRequest) -> tuple[str, int]:
    """(kind of device, world size)."""
    device, _, size = request.param.partition("-")
    return device, int(size)
