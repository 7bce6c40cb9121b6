"""Which worker processes of this user are alive: one small file each, which ``rlcore ps`` reads.

A process that could not tidy up (its parent was killed) leaves its file; the next look removes it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from rlcore.errors import InvalidInputError
from rlcore.settings import Settings


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
        return _folder() / f"{self.pid}.json"

    @property
    def age_s(self) -> float:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - self.started / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def announce(pid: int, device: str, engines: list[str]) -> LivingProcess:
    """Write, or write again, what a process is for."""
    process = LivingProcess(pid=pid, started=_started(pid) or 0, parent=os.getpid(), device=device, engines=engines)
    process.path.write_bytes(msgspec.json.encode(process))
    return process


def living_processes() -> list[LivingProcess]:
    """Worker processes that run now, oldest first; files of those that have ended are removed."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            process = msgspec.json.decode(path.read_bytes(), type=LivingProcess)
        except (FileNotFoundError, msgspec.DecodeError):  # being written, or just removed
            continue
        if _started(process.pid) == process.started:
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
    os.killpg(pid, signal.SIGKILL)
    return processes[pid]


def _folder() -> Path:
    folder = Settings.from_env().runtime
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None if it is not running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])
