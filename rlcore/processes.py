"""Processes of this user on this machine: where they keep what lives as long as they do, and which still run."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlcore.errors import StateError, UnsupportedError
from rlcore.settings import Settings

_SHARED_MEMORY = re.compile(r"torch_(\d+)_.*")


def runtime_folder() -> Path:
    """``Settings.runtime``, made if needed, for this user alone.

    Raises:
        StateError: it cannot be made, or belongs to another user.
    """
    folder = Settings.from_env().runtime
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"the folder {folder} cannot be made: {error}; set RLCORE_RUNTIME to another one") from error
    if folder.stat().st_uid != os.getuid():  # anybody can make a folder of that name in /tmp
        raise StateError(f"the folder {folder} belongs to another user; set RLCORE_RUNTIME to one of your own")
    return folder


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks after boot (proc(5)); None if it is not running.

    With ``pid`` it names one process for ever: ids are used again.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def session_of(pid: int) -> int | None:
    """Of a running process, setsid(2); None if it is not running."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[3])


def state_of(pid: int) -> str:
    """The letter of proc(5): R running, S sleeping, T stopped, Z ended and not yet waited for; "" if there is none."""
    fields = _stat(pid)
    return "" if fields is None else fields[0]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def maker_of_shared_memory(name: str) -> int | None:
    """The process that torch named a file of /dev/shm after; None if it was not torch."""
    named = _SHARED_MEMORY.fullmatch(name)
    return int(named[1]) if named else None


def pid_namespace() -> int:
    """Of this process. Ids of another namespace, such as a container's, mean other processes here, or none."""
    return os.stat("/proc/self/ns/pid").st_ino


def boot_id() -> str:
    """Of the running kernel: another machine has another, and so has this one after a restart."""
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        raise UnsupportedError("telling this machine from another", f"it is done by {path} of Linux")
    return path.read_text().strip()
