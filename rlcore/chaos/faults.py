"""The table of faults: what is done, in which steps, at which moment, and which errors may come of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcore.chaos.channel import MISCHIEF
from rlcore.chaos.checks import ViolationError, check_error, require, told
from rlcore.chaos.damages import DAMAGES
from rlcore.chaos.engines import PATIENT_S, SHORT_S, Engines
from rlcore.chaos.model import PlannedError
from rlcore.engines.launchers import worker_process
from rlcore.engines.weight_sync.channels.peers import WorkerPeers
from rlcore.errors import (
    CheckpointError,
    RlcoreError,
    StateError,
    SyncError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rlcore.process.status import start_time

_LATEST_S = 0.25
"""Moments are drawn from this time after the start of a step; most steps of so small a model end within it."""
_CLOSE_S = 40.0
"""The longest that close() may take on a busy machine: five seconds for workers to end, and what follows a kill."""
_LONGEST_S = {"close": _CLOSE_S, "build": 2 * PATIENT_S, "two_savers": 2 * PATIENT_S}
"""The longest that a step may take; 100 s for the others. A deadline within one is ``SHORT_S``."""
_CALLS_OF_A_SYNC = 30
"""Roughly; those by small buckets have more, others fewer."""


@dataclass
class Strike:
    """One fault in one step."""

    engines: Engines
    step: str
    draw: random.Random
    words: str = ""
    """The deed and its moment, in words."""
    rank: int = 0
    device: str = ""
    """The device of the worker that was struck. A worker of another engine may share its process."""
    has_struck: bool = False

    @property
    def engine(self) -> Any:
        """The engine that the step uses; for those that use both, one of them."""
        uses = {"generate": "infer", "sync": "either", "close": "either", "offload": "either"}.get(self.step, "train")
        chosen = self.draw.choice(["train", "infer"]) if uses == "either" else uses
        return self.engines.train if chosen == "train" else self.engines.infer

    def victim(self) -> Any:
        engine = self.engine
        worker = self.draw.choice(engine.executors[0].workers)
        self.rank, self.device = worker.context.rank, worker.context.device_name
        self.words = f"rank {worker.context.rank} of {engine.label}"
        return worker

    def act(self) -> None:
        self.has_struck = True

    @contextlib.contextmanager
    def at_a_moment(self, act: Callable[[], None]) -> Iterator[None]:
        """Inside, ``act`` comes once: at a point of the step, or after some time."""
        if self.step == "sync" and self.draw.random() < 0.6:
            with self._before_a_call(self.draw.randrange(_CALLS_OF_A_SYNC), act):
                yield
            return
        if self.step in ("save_in_background", "close") and self.draw.random() < 0.6:
            self.words += " when a save has begun" if self.step != "close" else " just before it"
            self.engines.between = partial(self._do, act)
            try:
                yield
            finally:
                self.engines.between = lambda: None
            return
        delay_s = self.draw.random() * _LATEST_S
        self.words += f" after {delay_s:.3f} s"
        with _soon(delay_s, partial(self._do, act)):
            yield

    def _do(self, act: Callable[[], None]) -> None:
        self.has_struck = True
        act()

    @contextlib.contextmanager
    def _before_a_call(self, number: int, act: Callable[[], None]) -> Iterator[None]:
        real = WorkerPeers.call
        numbers = itertools.count()

        def call(peers: WorkerPeers, method: str, *arguments: Any) -> list[Any]:
            if next(numbers) == number:
                self.words += f" before call {number} of the sync, {method}()"
                self._do(act)
            return real(peers, method, *arguments)

        WorkerPeers.call = call  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            WorkerPeers.call = real  # type: ignore[method-assign]
            if not self.has_struck:
                self.words += " after it"
                self._do(act)


@contextlib.contextmanager
def _soon(delay_s: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(delay_s, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table."""

    strike: Callable[[Strike], AbstractContextManager[None]]
    """Inside what it returns the step runs."""
    steps: str
    """The steps that it may meet."""
    errors: tuple[type[RlcoreError], ...] = ()
    """The errors that the step, or the engines' next call, may raise."""
    must_fail: bool = False
    """One of them must come."""
    names_rank: bool = False
    says: str = ""
    """A regular expression that the error's text must match, and ..."""
    says_not: str = ""
    """... must not."""


# ------------------------------------------------------------------------------------------------ of workers


@contextlib.contextmanager
def _nothing(strike: Strike) -> Iterator[None]:
    strike.act()
    yield


@contextlib.contextmanager
def _kill(strike: Strike) -> Iterator[None]:
    if strike.step == "build":
        with _kill_at_start(strike):
            yield
        return
    worker = strike.victim()
    with strike.at_a_moment(partial(_send_signal, worker.process_id, signal.SIGKILL)):
        yield


@contextlib.contextmanager
def _kill_at_start(strike: Strike) -> Iterator[None]:
    """Kill the first worker process that starts."""
    strike.engines.close()
    earlier = set(_worker_processes())
    delay_s = strike.draw.random() * 3
    strike.words = f"the first worker {delay_s:.2f} s after its process was there"
    strike.device = strike.engines.layout.trainers[0]
    is_over = threading.Event()

    def kill() -> None:
        while not (found := [pid for pid in _worker_processes() if pid not in earlier]):
            if is_over.wait(0.01):
                return
        is_over.wait(delay_s)
        strike.act()
        _send_signal(found[0], signal.SIGKILL)

    with _soon(0.0, kill):
        try:
            yield
        finally:
            is_over.set()


def _worker_processes() -> list[int]:
    return [process.pid for process in list(worker_process._processes.values())]


@contextlib.contextmanager
def _stop(strike: Strike) -> Iterator[None]:
    worker = strike.victim()
    strike.engines.be_patient(SHORT_S if strike.step != "close" else 2 * _CLOSE_S)
    with strike.at_a_moment(partial(_send_signal, worker.process_id, signal.SIGSTOP)):
        yield


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def _user_exception(strike: Strike) -> Iterator[None]:
    rank = strike.draw.randrange(len(strike.engines.layout.trainers))
    num_passes = strike.draw.randrange(2)
    strike.words, strike.rank = f"in forward pass {num_passes} of rank {rank}", rank
    strike.device = strike.engines.layout.trainers[rank]
    strike.engines.train.call("fail_in", rank, num_passes)
    strike.act()
    yield


@contextlib.contextmanager
def _closed_descriptors(strike: Strike) -> Iterator[None]:
    """The user's code closes what it has not opened."""
    worker = strike.victim()
    strike.act()
    strike.engines.train.call("run", _close_descriptors, worker.context.rank)
    yield


def _close_descriptors(module: Any, rank: int) -> None:
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if here == rank:
        os.closerange(3, 1 << 16)


@contextlib.contextmanager
def _no_memory(strike: Strike) -> Iterator[None]:
    strike.words, strike.device = "1 GiB where 64 MiB are left", strike.engines.layout.trainers[0]
    strike.act()
    strike.engines.train.call("run", _allocate, 0)
    yield


def _allocate(module: Any, rank: int) -> None:
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if here != rank:
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        torch.empty(1 << 30, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _clock_jump(strike: Strike) -> Iterator[None]:
    """The calendar's clock of the program and the trainer's workers jumps; the monotonic one does not."""
    offset_s = strike.draw.choice([-1e9, -3600.0, 3600.0, 1e9])
    strike.words = f"by {offset_s:g} s"
    strike.engines.train.call("run", _shift_clock, offset_s)
    with strike.at_a_moment(partial(_shift_clock, None, offset_s)):
        yield
    _shift_clock(None, 0.0)
    strike.engines.train.call("run", _shift_clock, 0.0)


_REAL_TIME, _REAL_TIME_NS = time.time, time.time_ns


def _shift_clock(module: Any, offset_s: float) -> None:
    time.time = lambda: _REAL_TIME() + offset_s
    time.time_ns = lambda: _REAL_TIME_NS() + int(offset_s * 1e9)
    if not offset_s:
        time.time, time.time_ns = _REAL_TIME, _REAL_TIME_NS


@contextlib.contextmanager
def _connections(strike: Strike) -> Iterator[None]:
    """Another program connects to every port that the workers listen to, and keeps the connections."""
    workers = strike.engines.train.executors[0].workers
    ports = sorted({port for worker in workers for port in _listening_ports(worker.process_id)})
    strike.words = f"{_NUM_CONNECTIONS} to each of {len(ports)} ports"
    limits = {worker.process_id: resource.prlimit(worker.process_id, resource.RLIMIT_NOFILE) for worker in workers}
    for pid, (_, hard) in limits.items():  # workers raise theirs as far as they may
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_NUM_DESCRIPTORS, hard))
    strike.act()
    stranger = subprocess.Popen(
        [sys.executable, "-c", _STRANGER, str(_NUM_CONNECTIONS), *map(str, ports)], stdout=subprocess.PIPE
    )
    try:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        yield
    finally:
        stranger.kill()
        stranger.communicate()
        for pid, limit in limits.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


_NUM_CONNECTIONS, _NUM_DESCRIPTORS = 1100, 1024
_STRANGER = """
import resource, socket, sys, time
count, *ports = map(int, sys.argv[1:])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
kept = []
for port in ports:
    for address in ("127.0.0.1", "::1"):
        try:
            for _ in range(count):
                kept.append(socket.create_connection((address, port), timeout=1))
        except OSError:
            pass
print(len(kept), flush=True)
time.sleep(600)
"""


def _listening_ports(pid: int) -> list[int]:
    own = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return found


# ---------------------------------------------------------------------------------------------- of the disk


@contextlib.contextmanager
def _full_disk(strike: Strike) -> Iterator[None]:
    """No file of one worker can grow beyond some bytes."""
    worker = strike.victim()
    most = strike.draw.choice([0, 100, 5_000, 50_000])
    strike.words += f" can write {most} bytes a file"
    soft, hard = resource.prlimit(worker.process_id, resource.RLIMIT_FSIZE)
    resource.prlimit(worker.process_id, resource.RLIMIT_FSIZE, (most, hard))
    strike.act()
    try:
        yield
    finally:
        resource.prlimit(worker.process_id, resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _slow_disk(strike: Strike) -> Iterator[None]:
    """One worker is stopped and goes on by turns, as one whose writes wait for a disk."""
    worker = strike.victim()
    is_over = threading.Event()

    def turns() -> None:
        while not is_over.wait(0.01):
            _send_signal(worker.process_id, signal.SIGSTOP)
            is_over.wait(strike.draw.random() * 0.2)
            _send_signal(worker.process_id, signal.SIGCONT)

    strike.words += " is slowed"
    strike.act()
    with _soon(0.0, turns):
        try:
            yield
        finally:
            is_over.set()


@contextlib.contextmanager
def _damage(kind: str, strike: Strike) -> Iterator[None]:
    engines = strike.engines
    folder = engines.checkpoints
    older, kept = folder.with_name(f"{folder.name}-older"), folder.with_name(f"{folder.name}-kept")
    for copy in (older, kept):
        engines.learn(strike.draw)
        engines.save()
        shutil.copytree(folder, copy)
    strike.words = DAMAGES[kind](folder, strike.draw)
    strike.act()
    try:
        yield
    finally:
        for path in (folder, older):
            shutil.rmtree(path)
        kept.rename(folder)


# -------------------------------------------------------------------------------------- of the runtime folder


def _runtime(strike: Strike) -> Path:
    return strike.engines.scratch / "runtime"


@contextlib.contextmanager
def _open_folder(strike: Strike) -> Iterator[None]:
    """Everybody may write into the runtime folder when the program starts."""
    strike.engines.close()
    folder = _runtime(strike)
    folder.chmod(0o777)
    strike.act()
    try:
        yield
    finally:
        folder.chmod(0o700)


@contextlib.contextmanager
def _foreign_link(strike: Strike) -> Iterator[None]:
    """The runtime folder is a link that another user made. Who is not root makes one of their own."""
    strike.engines.close()
    folder = _runtime(strike)
    kept = folder.with_name("elsewhere")
    folder.rename(kept)
    folder.symlink_to(kept)
    if os.getuid() == 0:
        os.lchown(folder, 65534, 65534)
    strike.act()
    try:
        yield
    finally:
        folder.unlink()
        kept.rename(folder)


@contextlib.contextmanager
def _planted_record(strike: Strike) -> Iterator[None]:
    """A record of a process that is no worker, with characters for a terminal in it."""
    bystander = subprocess.Popen(["sleep", "600"], env={})
    record = _runtime(strike) / f"worker-{os.stat('/proc/self/ns/pid').st_ino}-{bystander.pid}.json"
    record.write_text(
        f'{{"pid": {bystander.pid}, "started": {start_time(bystander.pid)}, "parent": 1, '
        '"device": "cpu:0\\u001b[2J", "engines": ["\\u001b]0;taken\\u0007"]}'
    )
    strike.words = f"of process {bystander.pid}"
    strike.act()
    try:
        yield
        command = [sys.executable, "-m", "rlcore", "ps", "--kill", str(bystander.pid)]
        subprocess.run(command, check=False, capture_output=True, timeout=200)
        require(bystander.poll() is None, "`rlcore ps --kill` ended a process that is no worker")
    finally:
        bystander.kill()
        bystander.wait()
        record.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- of messages


@contextlib.contextmanager
def _meddle(kind: str, strike: Strike) -> Iterator[None]:
    strike.engines.mischief = kind
    strike.act()
    try:
        yield
    finally:
        strike.engines.mischief = ""


_OF_WORKERS = "call train generate offload sync save save_in_background load close"
_ALL = f"build {_OF_WORKERS} two_savers list_processes channel"

FAULTS: dict[str, Fault] = {
    "none": Fault(strike=_nothing, steps=_ALL),
    "kill": Fault(
        strike=_kill,
        steps=f"build {_OF_WORKERS}",
        errors=(WorkerDiedError, SyncError, CheckpointError, StateError),
        must_fail=True,
        names_rank=True,
        says="SIGKILL",
    ),
    "stop": Fault(
        strike=_stop,
        steps=_OF_WORKERS,
        errors=(WorkerTimeoutError, SyncError, CheckpointError, StateError),
        must_fail=True,
        names_rank=True,
    ),
    "exception_of_the_user": Fault(
        strike=_user_exception,
        steps="train",
        errors=(WorkerError,),
        must_fail=True,
        names_rank=True,
        says=PlannedError.__name__,
    ),
    "closed_descriptors": Fault(
        strike=_closed_descriptors,
        steps="call",
        errors=(WorkerDiedError,),
        must_fail=True,
        names_rank=True,
        says_not="sent by somebody",
    ),
    "no_memory": Fault(
        strike=_no_memory, steps="call", errors=(WorkerError,), must_fail=True, names_rank=True, says="1073741824"
    ),
    "clock_jump": Fault(strike=_clock_jump, steps="call train generate offload sync save save_in_background load"),
    "connections": Fault(strike=_connections, steps="train"),
    "full_disk": Fault(
        strike=_full_disk,
        steps="save save_in_background",
        errors=(CheckpointError,),
        must_fail=True,
        says="File too large",
    ),
    "slow_disk": Fault(strike=_slow_disk, steps="save save_in_background"),
    "open_folder": Fault(
        strike=_open_folder, steps="build", errors=(StateError,), must_fail=True, says="(?s)/runtime.*0?700"
    ),
    "foreign_link": Fault(strike=_foreign_link, steps="build", errors=(StateError,), must_fail=True, says="/runtime"),
    "planted_record": Fault(strike=_planted_record, steps="list_processes"),
} | {
    kind: Fault(
        strike=partial(_damage, kind), steps="load", errors=(CheckpointError,), must_fail=True, says="/checkpoint"
    )
    for kind in DAMAGES
} | {kind: Fault(strike=partial(_meddle, kind), steps="channel") for kind in MISCHIEF}  # fmt: skip

PAIRS = [(step, name) for name, fault in FAULTS.items() for step in fault.steps.split()]
"""All steps with the faults that may meet them."""


def judge(fault: Fault, strike: Strike, error: BaseException | None, seconds: float) -> None:
    """Raise ViolationError unless the step ended as the fault's row promises."""
    longest_s = _LONGEST_S.get(strike.step, 100.0)
    require(seconds <= longest_s, f"{strike.step} took {seconds:.0f} s, at most {longest_s:g} s were promised")
    if error is None:
        is_needed = fault.must_fail and strike.has_struck and strike.step != "close"
        require(not is_needed, f"{strike.step} went on as if nothing had happened")
        return
    if not strike.has_struck:
        raise ViolationError(f"{type(error).__name__} came before any fault: {error}") from error
    if not fault.errors:
        raise ViolationError(f"no error was promised, and {type(error).__name__} came: {told(error)}") from error
    _check_text(fault, strike, error)


def _check_text(fault: Fault, strike: Strike, error: BaseException) -> None:
    text = told(error)
    check_error(error, fault.errors)
    if fault.names_rank:
        blamed = getattr(error, "device", "")  # of errors of workers
        named = blamed == strike.device if blamed else f"rank {strike.rank}" in text or strike.device in text
        require(named, f"rank {strike.rank} ({strike.device}) was struck, and the error blames another: {text}")
    require(re.search(fault.says, text), f"the error does not say {fault.says!r}: {text}")
    wrong = fault.says_not and re.search(fault.says_not, text)
    require(not wrong, f"the error says {fault.says_not!r}, which is not so: {text}")
