"""What a worker process and its descendants named in /dev/shm goes with them, also what nobody has open any more."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from rlcore.engines.launchers import boot
from rlcore.processes import session_of

SHARED = Path("/dev/shm")


class Maker:
    def __init__(self, context: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def start_child(self) -> int:
        """As vLLM's workers, it says what it is where its environment was."""
        code = "import ctypes, os, sys; end = open('/proc/self/stat').read().rpartition(')')[2].split();"
        code += " first, last = int(end[47]), int(end[48]); ctypes.memset(first, 0, last - first); print(flush=True);"
        code += " import time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout and child.stdout.readline()
        return child.pid

    def make(self) -> list[str]:
        """As vLLM has them, when those that had them open were killed."""
        self.lock: Any = multiprocessing.get_context("spawn").Lock()
        ring = SharedMemory(create=True, size=4096)
        ring.close()
        of_vllm = SHARED / f"vllm_dist_{os.environ[boot.MARK]}-tp:0"
        of_vllm.touch()
        return [f"sem.{self.lock._semlock.name.removeprefix('/')}", ring.name, of_vllm.name]

    def has_open(self, name: str) -> bool:
        return boot._file(SHARED / name) in boot._shared_memory([os.getpid()])


@pytest.mark.parametrize("how", ["stop", "SIGKILL"])
def test_nothing_stays(how: str, start_group: Callable[..., Any], wait_until: Any, capfd: Any) -> None:
    with start_group(Maker) as group:
        names = group.workers[0].call("make").result()
        assert all((SHARED / name).exists() for name in names)
        if how == "SIGKILL":
            os.kill(group.workers[0].process_id, signal.SIGKILL)
    wait_until(lambda: not any((SHARED / name).exists() for name in names))
    assert "resource_tracker" not in "".join(capfd.readouterr())


def test_a_child_that_wrote_over_its_environment_ends_too(start_group: Callable[..., Any], wait_until: Any) -> None:
    with start_group(Maker) as group:
        child = group.workers[0].call("start_child").result()
        assert boot.MARK not in Path(f"/proc/{child}/environ").read_text()
        os.kill(group.workers[0].process_id, signal.SIGKILL)
        wait_until(lambda: session_of(child) is None)


def test_a_semaphore_is_found_in_the_process_that_made_it(start_group: Callable[..., Any]) -> None:
    """Which sees it under a name that it had for a moment."""
    with start_group(Maker) as group:
        semaphore, ring, _ = group.workers[0].call("make").result()
        assert group.workers[0].call("has_open", semaphore).result()
        assert not group.workers[0].call("has_open", ring).result()


def test_a_file_of_the_same_inode_on_another_file_system_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(boot.MARK, "no name has this")
    path = SHARED / f"psm_{os.getpid()}_{tmp_path.name}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            device, inode = boot._file(path)
            assert (device, inode) in boot._shared_memory([os.getpid()])
        boot._remove_memory({(f"{device}0", inode)})  # what a living process has open would stay anyway
        assert path.exists()
        boot._remove_memory({(device, inode)})
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
