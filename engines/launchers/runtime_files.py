"""The files of worker processes in the runtime folder: a record of each process, and a store folder of each group.

Names carry the PID namespace. Files of another namespace, such as a container that shares the folder, are left alone,
because nobody here can tell whether its processes still run. This module is light: the guard of a worker process uses
it before anything large is imported.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from rlcore.process.runtime_folder import runtime_folder
from rlcore.process.status import pid_namespace, start_time


def record_of(pid: int) -> Path:
    """Return the path of the file that says what a worker process is for."""
    return runtime_folder() / f"worker-{pid_namespace()}-{pid}.json"


def records() -> Iterator[Path]:
    """Yield the records of this namespace, also of processes that have ended."""
    return runtime_folder().glob(f"worker-{pid_namespace()}-*.json")


def new_store() -> Path:
    """Make a folder of this process through which the workers of one group find each other."""
    remove_stale_stores()
    name = f"store-{pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{uuid.uuid4().hex[:8]}"
    store = runtime_folder() / name
    store.mkdir(mode=0o700)
    return store


def remove_stale_stores() -> None:
    """Remove the stores whose process has ended."""
    for store in runtime_folder().glob(f"store-{pid_namespace()}-*-*-*"):
        if is_stale_store(store):
            shutil.rmtree(store, ignore_errors=True)


def is_stale_store(path: Path) -> bool:
    """Return True for a store of this namespace whose process has ended."""
    match path.name.split("-"):
        case ["store", namespace, pid, started, _] if namespace == str(pid_namespace()) and pid.isdecimal():
            return str(start_time(int(pid))) != started
    return False
