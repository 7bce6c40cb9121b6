"""Which worker processes of this user are alive: one small file each, which ``rlcore ps`` reads.

What a process could not tidy up, its file and the folder through which workers found each other, the next look
removes. Files of another PID namespace, such as those of a container that shares the folder, are left alone: nobody
here can tell whether their processes live.
"""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from pathlib import Path

import msgspec

from rlcore.errors import InvalidInputError
from rlcore.processes import pid_namespace, runtime_folder, start_time


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
        return runtime_folder() / f"worker-{pid_namespace()}-{self.pid}.json"

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


def new_store() -> Path:
    """A folder of this process through which the workers of one group find each other."""
    _remove_stores_of_the_dead()
    name = f"store-{pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{uuid.uuid4().hex[:8]}"
    store = runtime_folder() / name
    store.mkdir(mode=0o700)
    return store


def living_processes() -> list[LivingProcess]:
    """Worker processes that run now, oldest first; what those that have ended left behind is removed."""
    _remove_stores_of_the_dead()
    found = []
    for path in runtime_folder().glob(f"worker-{pid_namespace()}-*.json"):
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
    os.killpg(pid, signal.SIGKILL)
    return processes[pid]


def _remove_stores_of_the_dead() -> None:
    for store in runtime_folder().glob(f"store-{pid_namespace()}-*-*-*"):
        _, _, pid, started, _ = store.name.split("-")
        if str(start_time(int(pid))) != started:
            shutil.rmtree(store, ignore_errors=True)
