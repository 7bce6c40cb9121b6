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
from rlcore.processes import session_of
from rlcore.settings import Settings


def main(descriptor: int, stack_descriptor: int, parent: int, *, is_parents_python: bool) -> None:
    """Serve the parent at the other end of the socket ``descriptor``; write stacks to ``stack_descriptor``.

    Of a parent with another interpreter nothing is unpickled: its calls are plain data.
    """
    faulthandler.enable(stack_descriptor)
    # Of the main thread, which serves the calls. Walking the frames of others while they run can end the process by
    # SIGSEGV (python/cpython#116008, #131580).
    faulthandler.register(signal.SIGUSR1, file=stack_descriptor, all_threads=False)
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), _QUIET_TRACKERS)))
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

_QUIET_TRACKERS = "ignore:resource_tracker:UserWarning"
"""What Python's resource trackers remove after a killed process is no news: ``_guard`` counts on them."""
_TRACKERS_S = 5.0


def _leave_guard(parent: int) -> None:
    """Fork a small process that kills this one's descendants when the parent, or this one, has ended, and this one too.

    Nobody else kills them: what they share by name can be seen only while they live. Python's resource trackers among
    them are left to end by themselves, as they remove the names of those that were killed before.

    From outside, because a stopped process or one in a C loop cannot end itself. (The kernel's PR_SET_PDEATHSIG
    spares descendants and speaks of the parent thread.)
    """
    session = os.getpid()  # the parent made it the leader of its own
    watched = [os.pidfd_open(parent), os.pidfd_open(session)]
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    if os.fork() == 0:
        _guard(session, watched)
    for descriptor in watched:
        os.close(descriptor)


def _guard(session: int, watched: list[int]) -> None:
    os.setpgid(0, 0)  # who ends the worker's group does not end it
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (descriptor := int(entry.name)) not in watched:
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(descriptor)
    select.select(watched, [], [])
    try:
        shared = _shared_memory(_descendants(session))  # while they live
        deadline = time.monotonic() + _TRACKERS_S
        while left := _descendants(session):  # what they start meanwhile, too
            is_late = time.monotonic() > deadline
            for pid in left:
                if is_late or not _is_tracker(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        _remove_memory(shared)
        record_of(session).unlink(missing_ok=True)
        remove_stores_of_the_dead()
    finally:
        os._exit(0)


def _refuse_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise StateError("breakpoint() in a worker process has no terminal; set RLCORE_DEBUG=pdb to run workers in yours")


def _descendants(session: int) -> list[int]:
    """Living processes of a worker's session, and those in sessions of their own that carry its mark.

    Who sets a title for itself, such as vLLM's workers, writes over the environment that others see.
    """
    return [pid for pid in _processes() if pid != os.getpid() and (session_of(pid) == session or _is_marked(pid))]


def _is_marked(pid: int) -> bool:
    mark = f"{MARK}={os.environ[MARK]}".encode()
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


_File = tuple[str, int]
"""Device and inode as in proc(5): another mount namespace has another /dev/shm, with the same inodes."""


def _shared_memory(pids: list[int]) -> set[_File]:
    """The files of /dev/shm that these processes have open.

    Who made a semaphore sees it under a name that it no longer has.
    """
    found: set[_File] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if " /dev/shm/" in line:
                    device, inode = line.split(maxsplit=5)[3:5]
                    found.add((device, int(inode)))
    return found


def _file(path: Path) -> _File:
    found = path.stat()
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", found.st_ino


def _remove_memory(files: set[_File]) -> None:
    """Of what ``NAMED_MEMORY`` knows: what bears this one's mark, and of these what no living process has open."""
    left = files and files - _shared_memory(_processes())
    for entry in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            is_ours = os.environ[MARK] in entry.name or _file(entry) in left
            if is_ours and entry.name.startswith(NAMED_MEMORY):
                entry.unlink()
