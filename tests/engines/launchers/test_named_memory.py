"""What a worker process and its descendants named in /dev/shm goes with them, also what nobody has open any more."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from rlcore.process import guard
from rlcore.process.status import session_of

SHARED = Path("/dev/shm")
PR_SET_NAME = 15  # prctl(2)


class Maker:
    def __init__(self, context: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def start_child(self) -> int:
        """As vLLM's workers, it says what it is where its environment was; its name is cut in a letter."""
        code = "import ctypes, os, sys; end = open('/proc/self/stat').read().rpartition(')')[2].split();"
        code += f" ctypes.CDLL(None).prctl({PR_SET_NAME}, {'fourteen bytesé'.encode()!r});"
        code += " first, last = int(end[47]), int(end[48]); ctypes.memset(first, 0, last - first); print(flush=True);"
        code += " import time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout and child.stdout.readline()
        return child.pid

    def fork(self, in_own_session: bool) -> int:
        """Process id of a child that holds this process's socket and output."""
        child = os.fork()
        if child == 0:
            if in_own_session:
                os.setsid()
            time.sleep(600)
            os._exit(0)
        return child

    def make(self) -> list[str]:
        """As vLLM has them, when those that had them open were killed."""
        self.lock: Any = multiprocessing.get_context("spawn").Lock()
        ring = SharedMemory(create=True, size=4096)
        ring.close()
        of_vllm = SHARED / f"vllm_dist_{os.environ[guard.FAMILY]}-tp:0"
        of_vllm.touch()
        return [f"sem.{self.lock._semlock.name.removeprefix('/')}", ring.name, of_vllm.name]

    def has_open(self, name: str) -> bool:
        return guard._file(SHARED / name) in guard.shared_memory([os.getpid()])


def guard_of(worker: int) -> int:
    """Return the process of its session that leads a process group besides the worker."""
    others = [pid for pid in guard._processes() if session_of(pid) == worker != pid]
    leaders = [pid for pid in others if os.getpgid(pid) == pid]
    (found,) = [pid for pid in leaders if session_of(pid) == worker]  # a fork may have begun its own session meanwhile
    return found


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.slow), "SIGKILL"])
def test_nothing_stays_of_a_worker_and_its_descendants(
    how: str, start_group: Callable[..., Any], wait_until: Any, capfd: Any
) -> None:
    with start_group(Maker) as group:
        (worker,) = group.workers
        names = worker.call("make").result()
        assert all((SHARED / name).exists() for name in names)
        unmarked = worker.call("start_child").result()
        assert guard.FAMILY not in Path(f"/proc/{unmarked}/environ").read_text()
        descendants = [unmarked, *(worker.call("fork", in_own_session).result() for in_own_session in (False, True))]
        assert None not in map(session_of, descendants)
        assert b"(fourteen bytes\xc3)" in Path(f"/proc/{unmarked}/stat").read_bytes()
        if how == "SIGKILL":
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # to whoever's command line has a word
                os.kill(guard_of(worker.process_id), number)
            os.kill(worker.process_id, signal.SIGKILL)
            wait_until(lambda: set(map(session_of, descendants)) == {None})
    wait_until(lambda: set(map(session_of, descendants)) == {None})
    wait_until(lambda: not any((SHARED / name).exists() for name in names))
    assert "resource_tracker" not in "".join(capfd.readouterr())


def test_a_semaphore_is_found_in_the_process_that_made_it(join_group: Callable[..., Any]) -> None:
    """Which sees it under a name that it had for a moment."""
    with join_group(Maker) as group:
        semaphore, ring, _ = group.workers[0].call("make").result()
        assert group.workers[0].call("has_open", semaphore).result()
        assert not group.workers[0].call("has_open", ring).result()


def test_a_file_of_the_same_inode_on_another_file_system_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(guard.FAMILY, "no name has this")
    path = SHARED / f"psm_{os.getpid()}_{tmp_path.name}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            device, inode = guard._file(path)
            assert (device, inode) in guard.shared_memory([os.getpid()])
        guard.remove_memory({(f"{device}0", inode)})  # what a living process has open would stay anyway
        assert path.exists()
        guard.remove_memory({(device, inode)})
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
