"""What worker processes keep in the runtime folder while they live: a record each, and a folder for each group.

Names carry the PID namespace: what another one left, such as a container that shares the folder, is left alone, because
nobody here can tell whether its processes live. Light, as a worker's guard uses it before anything large is imported.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from rlcore.processes import pid_namespace, runtime_folder, start_time


def record_of(pid: int) -> Path:
    """The file that says what a worker process is for."""
    return runtime_folder() / f"worker-{pid_namespace()}-{pid}.json"


def records() -> Iterator[Path]:
    """Those of this namespace, living or not."""
    return runtime_folder().glob(f"worker-{pid_namespace()}-*.json")


def new_store() -> Path:
    """A folder of this process through which the workers of one group find each other."""
    remove_stores_of_the_dead()
    name = f"store-{pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{uuid.uuid4().hex[:8]}"
    store = runtime_folder() / name
    store.mkdir(mode=0o700)
    return store


def remove_stores_of_the_dead() -> None:
    for store in runtime_folder().glob(f"store-{pid_namespace()}-*-*-*"):
        if is_store_of_the_dead(store):
            shutil.rmtree(store, ignore_errors=True)


def is_store_of_the_dead(path: Path) -> bool:
    match path.name.split("-"):
        case ["store", namespace, pid, started, _] if namespace == str(pid_namespace()) and pid.isdecimal():
            return str(start_time(int(pid))) != started
    return False
