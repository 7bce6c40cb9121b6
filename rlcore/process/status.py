"""The processes of this machine as Linux shows them: which still run, and which is which."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlcore.errors import UnsupportedError

_SHARED_MEMORY = re.compile(r"torch_(\d+)_.*")


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot (proc(5)); None if it is not running.

    The pair (pid, start time) names one process for ever, while a pid is used again.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def process_name(pid: int) -> str:
    """Return a name of a running process that no other one has: on any host, in any container, at any time.

    Raises:
        UnsupportedError: the kernel is not Linux.
    """
    return f"{boot_id()}/{pid_namespace()}/{pid}/{start_time(pid)}"


def session_of(pid: int) -> int | None:
    """Return the session of a running process, setsid(2); None if it is not running."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[3])


def state_of(pid: int) -> str:
    """Return the letter of proc(5): R running, S sleeping, T stopped, Z ended and not waited for; "" if it is gone."""
    fields = _stat(pid)
    return "" if fields is None else fields[0]


def family_seconds(pid: int) -> float:
    """Return the processor time of a process, of all that descend from it, and of those that each has waited for."""
    stats = (_stat(one) for one in family_of(pid))
    ticks = sum(int(field) for fields in stats if fields is not None for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def family_of(pid: int) -> set[int]:
    """Return a process and all that descend from it, but for what has lost a parent on the way."""
    found = ((int(entry), _stat(int(entry))) for entry in os.listdir("/proc") if entry.isdigit())
    parents = {one: int(fields[1]) for one, fields in found if fields is not None}
    family = {pid}
    while more := {one for one, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; None if there is no such process that may be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a process may have any bytes as its name
        return text.rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last where /proc has hidepid=1
        return None


def maker_of_shared_memory(name: str) -> int | None:
    """Return the process that torch named a file of /dev/shm after; None if torch did not make the file."""
    named = _SHARED_MEMORY.fullmatch(name)
    return int(named[1]) if named else None


def pid_namespace() -> int:
    """Return the PID namespace of this process. In another one, such as a container's, ids mean other processes."""
    return os.stat("/proc/self/ns/pid").st_ino


def boot_id() -> str:
    """Return the id of the running kernel: another machine has another, and so has this one after a restart.

    Raises:
        UnsupportedError: the kernel is not Linux.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        raise UnsupportedError("telling this machine from another", f"it is done by {path} of Linux")
    return path.read_text().strip()
