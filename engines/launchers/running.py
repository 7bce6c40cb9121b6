"""The running worker processes of this user: each has a small file, which ``rlcore ps`` reads.

Files that an ended process could not remove are removed by the next reader (``runtime_files.py``). A file alone is not
believed: the process that it names must be this user's, have started when the file says, and be a worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec

from rlcore.engines.launchers.runtime_files import record_name, remove_stale_stores
from rlcore.errors import InvalidInputError
from rlcore.process.guard import FAMILY
from rlcore.process.runtime_folder import RuntimeFolder, runtime_folder
from rlcore.process.status import session_of, start_time


class RunningProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process."""

    pid: int
    started: int
    """Clock ticks after boot (proc(5)): with ``pid`` it names one process for ever."""
    parent: int
    device: str
    engines: list[str]

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


def announce(folder: RuntimeFolder, pid: int, device: str, engines: list[str]) -> None:
    """Write, or write again, the record of a process."""
    process = RunningProcess(pid=pid, started=start_time(pid) or 0, parent=os.getpid(), device=device, engines=engines)
    folder.write(record_name(pid), msgspec.json.encode(process))


def read_record(folder: RuntimeFolder, name: str) -> RunningProcess | None:
    """Return what a record says; None if it is not this user's, not whole, or stands under another process's name."""
    try:
        process = msgspec.json.decode(folder.read(name) or b"", type=RunningProcess)
    except (ValueError, RecursionError):  # msgspec's are ValueErrors: it is being written, or just removed
        return None
    return process if name == record_name(process.pid) else None


def running_processes() -> list[RunningProcess]:
    """Return the worker processes that run now, oldest first, and remove the files of those that have ended."""
    found = []
    with runtime_folder() as folder:
        remove_stale_stores(folder)
        for name in folder.names(record_name("*")):
            process = read_record(folder, name)
            if process is None:
                continue
            if start_time(process.pid) != process.started:
                folder.remove(name)
            elif _is_own_worker(process):
                found.append(process)
    return sorted(found, key=lambda process: process.started)


def kill(pid: int) -> RunningProcess:
    """End a worker process and its descendants; its engine raises WorkerDiedError.

    Raises:
        InvalidInputError: no worker process of this user has that id.
    """
    processes = {process.pid: process for process in running_processes()}
    if pid not in processes:
        raise InvalidInputError(f"no worker process has the id {pid}; living: {sorted(processes) or 'none'}")
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        descriptor = os.pidfd_open(pid)
        try:
            if start_time(pid) == processes[pid].started:  # the id does not mean another process by now
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return processes[pid]


def _is_own_worker(process: RunningProcess) -> bool:
    """Return True if this user runs it, and its maker started it as a worker: such a process leads a session."""
    folder = Path(f"/proc/{process.pid}")
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
        is_own = folder.stat().st_uid == os.getuid()
    except OSError:  # it has just ended, or belongs to another user
        return False
    is_worker = any(variable.startswith(f"{FAMILY}={process.parent}-".encode()) for variable in variables)
    return is_own and is_worker and session_of(process.pid) == process.pid
