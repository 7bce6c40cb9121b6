"""The running worker processes of this user: each has a small file, which ``rlcore ps`` reads.

Files that an ended process could not remove are removed by the next reader (``runtime_files.py``).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from rlcore.engines.launchers.runtime_files import record_of, records, remove_stale_stores
from rlcore.errors import InvalidInputError
from rlcore.process.status import start_time


class RunningProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process."""

    pid: int
    started: int
    """Clock ticks after boot (proc(5)): with ``pid`` it names one process for ever."""
    parent: int
    device: str
    engines: list[str]

    @property
    def path(self) -> Path:
        return record_of(self.pid)

    @property
    def age_s(self) -> float:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - self.started / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        """The resident memory; 0 when the process has just ended."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")


def announce(pid: int, device: str, engines: list[str]) -> RunningProcess:
    """Write, or write again, the record of a process."""
    process = RunningProcess(pid=pid, started=start_time(pid) or 0, parent=os.getpid(), device=device, engines=engines)
    process.path.write_bytes(msgspec.json.encode(process))
    return process


def running_processes() -> list[RunningProcess]:
    """Return the worker processes that run now, oldest first, and remove the files of those that have ended."""
    remove_stale_stores()
    found = []
    for path in records():
        try:
            process = msgspec.json.decode(path.read_bytes(), type=RunningProcess)
        except (FileNotFoundError, msgspec.DecodeError):  # being written, or just removed
            continue
        if start_time(process.pid) == process.started:
            found.append(process)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda process: process.started)


def kill(pid: int) -> RunningProcess:
    """End a worker process and its descendants; its engine raises WorkerDiedError.

    Raises:
        InvalidInputError: no worker process of this user has that id.
    """
    processes = {process.pid: process for process in running_processes()}
    if pid not in processes:
        raise InvalidInputError(f"no worker process has the id {pid}; living: {sorted(processes) or 'none'}")
    os.kill(pid, signal.SIGKILL)
    return processes[pid]
