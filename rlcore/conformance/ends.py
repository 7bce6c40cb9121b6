"""Ends of a worker: how soon a killed one is named, and whether a closed one leaves processes or shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import WorkerDiedError
from rlcore.process.status import start_time

GONE_S = 30.0
"""The time within which something that ended is missed, or has left nothing."""


def check_killed_worker_is_named(engine: Any, method: str, call: Callable[[], Any]) -> None:
    """Kill the worker of rank 0 in the middle of ``call``, which runs its ``method``."""
    pid = engine.executors[0].workers[0].process_id
    os.kill(pid, signal.SIGSTOP)  # so that the call has not ended when the worker is killed
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"the worker of rank 0 \(.+\) .*during {method}\(\)"):
        call()
    assert time.monotonic() - began < GONE_S, "its death was noticed late"
    killer.join()


class Belongings:
    """The processes of an engine's worker of rank 0, and the shared memory that they alone have mapped."""

    def __init__(self, engine: Any) -> None:
        own = engine.executors[0].workers[0].process_id
        self._processes = {own: start_time(own)} | descendants(own)
        self._memory = mapped_shared_memory(self._processes) - mapped_shared_memory([os.getpid()])

    def wait_until_gone(self) -> None:
        wait_until(
            lambda: not [pid for pid, began in self._processes.items() if began and start_time(pid) == began],
            "not all processes of the worker ended",
        )
        wait_until(
            lambda: not any(map(os.path.exists, self._memory)), "not all shared memory of the worker was removed"
        )


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GONE_S
    while not is_so():
        assert time.monotonic() < deadline, f"{what} within {GONE_S:g} s"
        time.sleep(0.05)


def descendants(pid: int) -> dict[int, int | None]:
    """Processes that a process started, and they in turn, with when each began."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                parent = int((path / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(path.name))
    found, rest = {}, children.get(pid, [])
    while rest:
        one = rest.pop()
        found[one] = start_time(one)
        rest += children.get(one, [])
    return found


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Files of /dev/shm that processes have mapped, and that others could open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line[line.find("/dev/shm/") :] if "/dev/shm/" in line else ""
                if path and not path.endswith("(deleted)"):
                    found.add(path)
    return {path for path in found if os.path.exists(path)}
