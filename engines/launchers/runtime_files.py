"""The files of worker processes in the runtime folder: a record of each process, and a store folder of each group.

Names carry the PID namespace. Files of another namespace, such as a container that shares the folder, are left alone,
because nobody here can tell whether its processes still run. This module is light: the guard of a worker process uses
it before anything large is imported.
"""

from __future__ import annotations

import os
import shutil
import uuid
import weakref
from pathlib import Path

from rlcore.process.exporter_socket import remove_stale_sockets
from rlcore.process.runtime_folder import RuntimeFolder, runtime_folder
from rlcore.process.status import pid_namespace, start_time


def record_name(pid: int | str) -> str:
    """Return the name of the file that says what a worker process is for; ``"*"`` gives a pattern of all names."""
    return f"worker-{pid_namespace()}-{pid}.json"


def new_store() -> Path:
    """Make a folder of this process through which the workers of one group find each other.

    What processes have left here that were killed together with their guards goes first.
    """
    name = f"store-{pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{uuid.uuid4().hex[:8]}"
    with runtime_folder() as folder:
        remove_stale_stores(folder)
        remove_stale_sockets(folder)
        _remove_stale_records(folder)
        return folder.make_folder(name)


class StoreFolder:
    """A folder as ``new_store`` makes it, which goes with this object, or at the end of this process."""

    def __init__(self) -> None:
        self.path = str(new_store())
        self.remove = weakref.finalize(self, _remove_own, self.path, os.getpid())


def _remove_own(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork that ends does not end the group
        shutil.rmtree(path, ignore_errors=True)


def _remove_stale_records(folder: RuntimeFolder) -> None:
    for name in folder.names(record_name("*")):
        pid = name.removesuffix(".json").rpartition("-")[2]
        if pid.isdecimal() and start_time(int(pid)) is None:
            folder.remove(name)


def remove_stale_stores(folder: RuntimeFolder) -> None:
    """Remove the stores whose process has ended."""
    for name in filter(is_stale_store, folder.names("store-*")):
        folder.remove(name)


def is_stale_store(name: str) -> bool:
    """Return True for the name of a store of this namespace whose process has ended."""
    match name.split("-"):
        case ["store", namespace, pid, started, _] if namespace == str(pid_namespace()) and pid.isdecimal():
            return str(start_time(int(pid))) != started
    return False
