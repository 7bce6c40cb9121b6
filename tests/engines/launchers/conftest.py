"""Worker groups of classes defined in tests, and the check that nothing is left of them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rlcore.engines.launchers import running as running_module
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.process.runtime_folder import RuntimeFolder
from rlcore.process.status import maker_of_shared_memory
from tests.warm import warm_workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file

StartGroup = Callable[..., AbstractContextManager[WorkerGroup]]

LONGEST_S = 60.0
"""What ends at all has ended by then; what hangs here, hangs for at least twice as long."""


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
        devices: list[str] | None = None,
        engine: str = "the test engine",
        launcher: str = "process",
        timeout_s: float = 100.0,
    ) -> Iterator[WorkerGroup]:
        names = devices or [f"cpu:{first + index}" for index in range(num_workers)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLCORE_RUNTIME", str(runtime_folder))
            patch.setenv("OMP_NUM_THREADS", "1")
            group = start_workers(worker_class, engine, names, launcher=launcher, timeout_s=timeout_s)
        try:
            yield group
        finally:
            group.stop()

    return start


class Idle:
    """Keeps its process."""

    def __init__(self, context: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def join_group(start_group: StartGroup) -> Iterator[StartGroup]:
    """As ``start_group``, on cpu:4 and cpu:5. Their two processes serve all tests that end no process."""
    with contextlib.ExitStack() as stack:
        with warm_workers():
            stack.enter_context(start_group(Idle, 2, first=4, engine="an engine that stays"))
        yield functools.partial(start_group, first=4)


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
    """``wait_until(condition)``: fails when the condition does not come true, on however busy a machine."""

    def wait(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {LONGEST_S:g} s"
            time.sleep(0.02)

    return wait


@pytest.fixture
def living(wait_until: Callable[..., None]) -> Callable[[str], list[int]]:
    """``living(text)``: ids of processes whose environment holds ``text``, descendants of workers included."""
    return processes_named_in


class Holdings:
    """What workers could leak: what this process holds since the test began, and what they themselves leave."""

    def __init__(self, runtime_folder: Path) -> None:
        self._folder = runtime_folder
        self._makers = {os.getpid()}
        self._earlier = set(threading.enumerate())  # of other tests: one left hanging may end at any time
        self._earlier_descriptors = descriptors()
        self._earlier_files = set(self._files())  # such as a socket of an engine in this very process
        self._earlier_memory = set(os.listdir("/dev/shm"))
        self._earlier_processes = set(processes_named_in(str(runtime_folder)))  # such as a tracker of Python's

    def worker(self, pid: int) -> None:
        """One of the test's workers; what it names in /dev/shm tells of it for ever."""
        self._makers.add(pid)

    def __call__(self) -> dict[str, Any]:
        threads = [thread.name for thread in set(threading.enumerate()) - self._earlier]
        return {
            "descriptors": sorted(descriptors() - self._earlier_descriptors),
            "threads": sorted(name for name in threads if name.startswith("rlcore")),
            "processes": sorted(set(processes_named_in(str(self._folder))) - self._earlier_processes),
            "files": sorted(set(self._files()) - self._earlier_files),
            "shared memory": sorted(set(self._memory()) - self._earlier_memory),
        }

    def _files(self) -> list[str]:
        return os.listdir(self._folder)

    def _memory(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if maker_of_shared_memory(name) in self._makers]


def descriptors() -> set[tuple[str, str]]:
    """Open files of this process, by number and by what they are."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them is closed
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@pytest.fixture
def holdings(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Holdings:
    found, announce = Holdings(runtime_folder), running_module.announce

    def announced(folder: RuntimeFolder, pid: int, device: str, engines: list[str]) -> None:
        found.worker(pid)
        announce(folder, pid, device, engines)

    monkeypatch.setattr(running_module, "announce", announced)
    return found


@pytest.fixture(scope="module")
def ray_host(runtime_folder: Path) -> Iterator[str]:
    """The name of the one host of a local Ray cluster that a file's tests share: to start one takes seconds."""
    from rlcore.engines.launchers.ray.cluster import connect, disconnect

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        patch.setenv("RLCORE_RUNTIME", str(runtime_folder))
        cluster = connect()
    yield cluster.hosts()[0].name
    disconnect()


@pytest.fixture(scope="module")
def two_raylets(runtime_folder: Path) -> Iterator[str]:
    """The address of a cluster of two raylets on this machine, with the names host-a and host-b."""
    from rlcore.engines.launchers.ray.cluster import connect, disconnect, set_local_variables

    set_local_variables()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.cluster_utils import Cluster

        patch.setenv("RLCORE_RUNTIME", str(runtime_folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "host-a", "include_dashboard": False}
        )
        cluster.add_node(num_cpus=2, node_name="host-b")
        connect(cluster.address)
    yield cluster.address
    disconnect()
    cluster.shutdown()
