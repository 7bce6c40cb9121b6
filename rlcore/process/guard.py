"""A guard: a small process that ends everything its maker started, and frees what that shared by name.

Nobody else would: what is shared by name can be seen only while the processes that share it still run. The guard is
light, because it is forked before anything large is imported.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rlcore.process.status import session_of

FAMILY = "_RLCORE_WORKER_PROCESS"
"""The environment variable that a guarded process and all that it starts inherit; they are found by it later."""
NAMED_MEMORY = ("psm_", "sem.mp-", "vllm_dist_", "sglang_", "sgl_shm_")
"""Memory in /dev/shm of Python's multiprocessing, and of vLLM and SGLang: it outlives killed processes."""
_TRACKERS_S = 5.0

MemoryFile = tuple[str, int]
"""Device and inode as in proc(5): another mount namespace has another /dev/shm, with the same inodes."""


def leave_guard(parent: int, clean_up: Callable[[], None]) -> None:
    """Fork the guard of this process, which leads its own session and has ``FAMILY`` in its environment.

    When ``parent`` or this process has ended, the guard kills this process and its descendants, removes the memory that
    they shared by name, and calls ``clean_up``. Python's resource trackers among them get some seconds to end by
    themselves, because they remove the names of processes that were killed before. The guard outlives the signals that
    ask programs to end: who sends them to all processes of a program must not end the guard first.

    It works from outside, because a stopped process or one in a C loop cannot end itself. The kernel's
    PR_SET_PDEATHSIG would not reach descendants, and it follows the parent's thread.
    """
    session = os.getpid()
    watched = [os.pidfd_open(parent), os.pidfd_open(session)]
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    if os.fork() == 0:
        _guard(session, watched, clean_up)
    for descriptor in watched:
        os.close(descriptor)


def _guard(session: int, watched: list[int], clean_up: Callable[[], None]) -> None:
    os.setpgid(0, 0)  # who ends the process group of the session does not end the guard
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (descriptor := int(entry.name)) not in watched:
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(descriptor)
    select.select(watched, [], [])
    try:
        shared = shared_memory(_descendants(session))  # while they still run
        _kill_descendants(session)
        remove_memory(shared and shared - shared_memory(_processes()))
        clean_up()
    finally:
        os._exit(0)


def _kill_descendants(session: int) -> None:
    deadline = time.monotonic() + _TRACKERS_S
    while left := _descendants(session):  # they may start others meanwhile
        is_late = time.monotonic() > deadline
        for pid in left:
            if is_late or not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants(session: int) -> list[int]:
    """Return the running processes of the session, and those in sessions of their own with the same ``FAMILY``.

    A process that sets its own title, such as vLLM's workers, overwrites the environment that others see.
    """
    return [pid for pid in _processes() if pid != os.getpid() and (session_of(pid) == session or _is_of_family(pid))]


def _is_of_family(pid: int) -> bool:
    variable = f"{FAMILY}={os.environ[FAMILY]}".encode()
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def shared_memory(pids: list[int]) -> set[MemoryFile]:
    """Return the files of /dev/shm that these processes have mapped.

    The process that made a semaphore sees it under a name that the semaphore no longer has, so names do not help.
    """
    found: set[MemoryFile] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():  # any bytes as paths
                if " /dev/shm/" in line:
                    device, inode = line.split(maxsplit=5)[3:5]
                    found.add((device, int(inode)))
    return found


def _file(path: Path) -> MemoryFile:
    found = path.stat()
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", found.st_ino


def remove_memory(files: set[MemoryFile]) -> None:
    """Remove ``NAMED_MEMORY`` that has this family in its name, or is one of ``files``."""
    for entry in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            is_ours = os.environ[FAMILY] in entry.name or _file(entry) in files
            if is_ours and entry.name.startswith(NAMED_MEMORY):
                entry.unlink()
