"""Worker processes that live as long as a measurement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers

TIMEOUT_S = 120.0


@contextlib.contextmanager
def worker_processes(worker_class: Any, device_names: list[str]) -> Iterator[WorkerGroup]:
    group = start_workers(worker_class, "the bench", device_names, launcher="process", timeout_s=TIMEOUT_S)
    try:
        yield group
    finally:
        group.stop()


def ask(group: WorkerGroup, method: str, *args: Any) -> Any:
    """All workers are called; the answer of the first."""
    return group.call(method, [(args, {})] * len(group.workers))[0]
