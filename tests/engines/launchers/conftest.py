"""Worker groups of classes defined in tests, and the check that nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.processes import shared_memory_names

StartGroup = Callable[..., AbstractContextManager[WorkerGroup]]


@pytest.fixture(scope="session")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(autouse=True)
def _runtime(_no_settings_from_outside: None, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(runtime_folder))


@pytest.fixture(scope="session")
def start_group(runtime_folder: Path) -> StartGroup:
    """``with start_group(Worker, 2) as group``: workers on cpu:0 and cpu:1, in processes unless said otherwise."""

    @contextlib.contextmanager
    def start(
        worker_class: Any,
        num_workers: int = 1,
        *,
        first: int = 0,
        engine: str = "the test engine",
        launcher: str = "process",
        timeout_s: float = 60.0,
    ) -> Iterator[WorkerGroup]:
        names = [f"cpu:{first + index}" for index in range(num_workers)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLCORE_RUNTIME", str(runtime_folder))
            patch.setenv("OMP_NUM_THREADS", "1")
            group = start_workers(worker_class, engine, names, launcher=launcher, timeout_s=timeout_s)
        try:
            yield group
        finally:
            group.stop()

    return start


def processes_named_in(text: str) -> list[int]:
    """Processes whose environment holds ``text``, such as a folder of this test; ended ones excluded."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
    return found


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """``wait_until(condition, timeout_s)``: fails when the condition does not come true."""

    def wait(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
            time.sleep(0.02)

    return wait


@pytest.fixture
def living(wait_until: Callable[..., None]) -> Callable[[str], list[int]]:
    """``living(text)``: ids of processes whose environment holds ``text``, descendants of workers included."""
    return processes_named_in


class Holdings:
    """What this process holds that workers could leak."""

    def __init__(self, runtime_folder: Path) -> None:
        self._folder = runtime_folder
        self._earlier = set(threading.enumerate())  # of other tests: one left hanging may end at any time
        self._earlier_memory = set(shared_memory_names())

    def __call__(self) -> dict[str, Any]:
        threads = [thread.name for thread in set(threading.enumerate()) - self._earlier]
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": sorted(name for name in threads if name.startswith("rlcore")),
            "processes": processes_named_in(str(self._folder)),
            "files": sorted(path.name for path in self._folder.iterdir()),
            "shared memory": sorted(set(shared_memory_names()) - self._earlier_memory),
        }


@pytest.fixture
def holdings(runtime_folder: Path) -> Holdings:
    return Holdings(runtime_folder)
