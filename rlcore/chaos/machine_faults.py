"""Faults of machines: of the clock, the network, the disk and the files that programs trust."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.chaos.checks import require
from rlcore.chaos.damages import DAMAGES
from rlcore.chaos.strike import Strike, send_signal, soon
from rlcore.process.status import start_time


@contextlib.contextmanager
def clock_jump(strike: Strike) -> Iterator[None]:
    """Let the calendar's clock of the program and the trainer's workers jump; the monotonic one does not."""
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
def connections(strike: Strike) -> Iterator[None]:
    """Another program connects to every port that the workers listen to, and keeps the connections."""
    workers = strike.engines.train.executors[0].workers
    ports = sorted({port for worker in workers for port in _listening_ports(worker.process_id)})
    strike.words = f"{_NUM_CONNECTIONS} to each of {len(ports)} ports"
    limits = {worker.process_id: resource.prlimit(worker.process_id, resource.RLIMIT_NOFILE) for worker in workers}
    for pid, (soft, hard) in limits.items():
        most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
        is_raised = soft == resource.RLIM_INFINITY or soft >= most
        require(is_raised, f"worker {pid} may have {soft} descriptors, and could have {most}")
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


_NUM_CONNECTIONS, _NUM_DESCRIPTORS, _MOST_DESCRIPTORS = 1100, 1024, 1 << 20
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
def full_disk(strike: Strike) -> Iterator[None]:
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
def slow_disk(strike: Strike) -> Iterator[None]:
    """Stop one worker and let it go on by turns, as one whose writes wait for a disk."""
    worker = strike.victim()
    is_over = threading.Event()

    def turns() -> None:
        while not is_over.wait(0.01):
            send_signal(worker.process_id, signal.SIGSTOP)
            is_over.wait(strike.draw.random() * 0.2)
            send_signal(worker.process_id, signal.SIGCONT)

    strike.words += " is slowed"
    strike.act()
    with soon(0.0, turns):
        try:
            yield
        finally:
            is_over.set()


@contextlib.contextmanager
def damage(kind: str, strike: Strike) -> Iterator[None]:
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
def open_folder(strike: Strike) -> Iterator[None]:
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
def foreign_link(strike: Strike) -> Iterator[None]:
    """Make the runtime folder a link of another user. Without root's rights it is a link of one's own."""
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
def planted_record(strike: Strike) -> Iterator[None]:
    """Write a record of a process that is no worker, with characters for a terminal in it."""
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
def meddle(kind: str, strike: Strike) -> Iterator[None]:
    strike.engines.mischief = kind
    strike.act()
    try:
        yield
    finally:
        strike.engines.mischief = ""
