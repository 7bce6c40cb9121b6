"""Which worker processes of this user are alive: one small file each, which ``rlcore ps`` reads.

What a process could not tidy up, the next look removes (``traces.py``).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from rlcore.engines.launchers.traces import record_of, records, remove_stores_of_the_dead
from rlcore.errors import InvalidInputError
from rlcore.processes import start_time


class LivingProcess(msgspec.Struct, frozen=True, kw_only=True):
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
        """0 when it has just ended."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")


def announce(pid: int, device: str, engines: list[str]) -> LivingProcess:
    """Write, or write again, what a process is for."""
    process = LivingProcess(pid=pid, started=start_time(pid) or 0, parent=os.getpid(), device=device, engines=engines)
    process.path.write_bytes(msgspec.json.encode(process))
    return process


def living_processes() -> list[LivingProcess]:
    """Worker processes that run now, oldest first; what those that have ended left behind is removed."""
    remove_stores_of_the_dead()
    found = []
    for path in records():
        try:
            process = msgspec.json.decode(path.read_bytes(), type=LivingProcess)
        except (FileNotFoundError, msgspec.DecodeError):  # being written, or just removed
            continue
        if start_time(process.pid) == process.started:
            found.append(process)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda process: process.started)


def kill(pid: int) -> LivingProcess:
    """End a worker process and its descendants; its engine raises WorkerDiedError.

    Raises:
        InvalidInputError: no worker process of this user has that id.
    """
    processes = {process.pid: process for process in living_processes()}
    if pid not in processes:
        raise InvalidInputError(f"no worker process has the id {pid}; living: {sorted(processes) or 'none'}")
    os.kill(pid, signal.SIGKILL)
    return processes[pid]
