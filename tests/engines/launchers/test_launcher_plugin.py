"""A launcher that a plugin registers starts the workers of an engine that asks for it by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.base.conftest import Site

LAUNCHER = """
@hookimpl
def rlcore_register_launchers(register):
    register("acme", f"{__name__}:AcmeLauncher")

from rlcore.engines.launchers.inline import InlineLauncher

class AcmeLauncher(InlineLauncher):
    def start(self, worker_class, placements, options):
        print("acme starts", options.engine, "on", *placements[0].devices)
        return super().start(worker_class, placements, options)
"""
PROGRAM = """
from rlcore.engines.launchers.launch import choose_launcher, start_workers
from rlcore.errors import InvalidInputError

class Worker:
    def __init__(self, context): self.context = context
    def where(self): return self.context.device_name
    def close(self): pass

name = choose_launcher("acme", 1)
group = start_workers(Worker, "the engine", ["cpu:0"], launcher=name, timeout_s=100)
print(group.call("where", [((), {})]))
group.stop()
try:
    choose_launcher("acmee", 1)
except InvalidInputError as error:
    print(error)
"""

# made of nothing but what the docstring of rlcore.engines.launchers.base names
PROCESSES = """
@hookimpl
def rlcore_register_launchers(register):
    register("acme", f"{__name__}:AcmeLauncher")

from rlcore.engines.launchers.base import Launcher, engine_numbers
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.process import start_in_child
from rlcore.engines.launchers.runtime_files import new_store
from rlcore.engines.launchers.worker import WorkerContext

class AcmeLauncher(Launcher):
    gives_processes = True

    def start(self, worker_class, placements, options):
        group = WorkerGroup(options.engine, options.timeout_s, str(new_store()))
        number = next(engine_numbers)
        with group.starting():
            for rank, placement in enumerate(placements):
                context = WorkerContext(
                    options.engine, rank, len(placements), placement.devices[0], number, store=group.store
                )
                group.workers.append(start_in_child(worker_class, context, {"ACME": "1"}, options))
        return group
"""
PROCESSES_PROGRAM = """
import os, pathlib
from rlcore.engines.launchers.launch import start_workers
from rlcore.errors import WorkerError

class Worker:
    def __init__(self, context):
        self.context = context
        if context.engine == "the broken engine" and context.rank == 1:
            raise ValueError("no worker of mine")
    def where(self) -> str: return f"{self.context.device_name} {os.environ['ACME']} {os.getpid() != PARENT}"
    def close(self) -> None: pass

PARENT = os.getpid()
start = lambda engine: start_workers(Worker, engine, ["cpu:0", "cpu:1"], launcher="acme", timeout_s=100)
group = start("the engine")
print(group.call("where", [((), {})] * 2))
group.stop()
try:
    start("the broken engine")
except WorkerError as error:
    print(str(error).splitlines()[0])
print(sorted(path.name for path in pathlib.Path(os.environ["RLCORE_RUNTIME"]).iterdir()))
"""


def test_a_plugins_launcher_starts_workers(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install("acme", LAUNCHER)
    found = site.run(PROGRAM, RLCORE_STRICT_PLUGINS="1", RLCORE_RUNTIME=str(tmp_path / "run"))
    assert found.returncode == 0, found.stderr
    started, called, refused = found.stdout.splitlines()
    assert started == "acme starts the engine on cpu:0"
    assert called == "['cpu:0']"
    assert refused.startswith("launcher must be one of ") and "acme" in refused.partition(", got ")[0]


@pytest.mark.slow
def test_a_plugins_launcher_starts_processes_and_leaves_none_after_a_failure(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install("acme", PROCESSES)
    found = site.run(PROCESSES_PROGRAM, RLCORE_STRICT_PLUGINS="1", RLCORE_RUNTIME=str(tmp_path / "run"))
    assert found.returncode == 0, found.stderr
    called, refused, left = found.stdout.splitlines()
    assert called == "['cpu:0 1 True', 'cpu:1 1 True']"
    assert "no worker of mine" in refused and "rank 1 (cpu:1)" in refused
    assert left == "[]"  # no record of a worker, and no store
