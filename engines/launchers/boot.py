"""How a worker process begins, before it imports anything large: it can show its stack, and ends with its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rlcore.engines.launchers.traces import record_of, remove_stores_of_the_dead
from rlcore.errors import StateError
from rlcore.settings import Settings


def main(descriptor: int, stack_descriptor: int, parent: int, *, is_parents_python: bool) -> None:
    """Serve the parent at the other end of the socket ``descriptor``; write stacks to ``stack_descriptor``.

    Of a parent with another interpreter nothing is unpickled: its calls are plain data.
    """
    faulthandler.enable(stack_descriptor)
    faulthandler.register(signal.SIGUSR1, file=stack_descriptor, all_threads=True)
    _leave_guard(parent)
    sys.breakpointhook = _refuse_breakpoint
    os.set_inheritable(descriptor, False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a pipe would hold back a page of lines
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("rlcore").setLevel(Settings.from_env().log_level)

    from rlcore.engines.launchers.child import Child
    from rlcore.engines.launchers.plain import load_plain_call
    from rlcore.engines.launchers.wire import Channel, load_call

    Child(Channel(socket.socket(fileno=descriptor)), load_call if is_parents_python else load_plain_call).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown can hang in a library's exit handlers; everything of ours is closed.
    os._exit(0)


MARK = "_RLCORE_WORKER_PROCESS"
"""Environment variable that a worker process and all it starts carry, by which they are found when it has ended."""

NAMED_MEMORY = ("psm_", "sem.mp-", "vllm_dist_")
"""Of Python's multiprocessing and of vLLM between its workers: it outlives processes that are killed."""


def _leave_guard(parent: int) -> None:
    """Fork a small process that kills this one's descendants when the parent, or this one, has ended, and this one too.

    Nobody else kills them: what they share by name can be seen only while they live.

    From outside, because a stopped process or one in a C loop cannot end itself. (The kernel's PR_SET_PDEATHSIG
    spares descendants and speaks of the parent thread.)
    """
    group = os.getpid()  # the parent made it the leader of its own
    watched = [os.pidfd_open(parent), os.pidfd_open(group)]
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    if os.fork() == 0:
        _guard(group, watched)
    for descriptor in watched:
        os.close(descriptor)


def _guard(group: int, watched: list[int]) -> None:
    os.setpgid(0, 0)  # outside the group that it kills
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (descriptor := int(entry.name)) not in watched:
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(descriptor)
    select.select(watched, [], [])
    try:
        shared = _named_memory(_marked())  # while they live
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        while left := _marked():  # in sessions of their own, and what they start meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for name in shared and shared - _named_memory(_processes()):
            Path("/dev/shm", name).unlink(missing_ok=True)
        record_of(group).unlink(missing_ok=True)
        remove_stores_of_the_dead()
    finally:
        os._exit(0)


def _refuse_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise StateError("breakpoint() in a worker process has no terminal; set RLCORE_DEBUG=pdb to run workers in yours")


def _marked() -> list[int]:
    """Living processes that carry this one's mark."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for pid in _processes():
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _named_memory(pids: list[int]) -> set[str]:
    """Files of /dev/shm that these processes have open, with names that ``NAMED_MEMORY`` knows."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition(" /dev/shm/")[2]
                if name.startswith(NAMED_MEMORY) and not name.endswith(" (deleted)"):
                    found.add(name)
    return found
