"""A launcher that a plugin registers starts the workers of an engine that asks for it by name."""

from __future__ import annotations

from pathlib import Path

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


def test_a_plugins_launcher_starts_workers(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install("acme", LAUNCHER)
    found = site.run(PROGRAM, RLCORE_STRICT_PLUGINS="1", RLCORE_RUNTIME=str(tmp_path / "run"))
    assert found.returncode == 0, found.stderr
    started, called, refused = found.stdout.splitlines()
    assert started == "acme starts the engine on cpu:0"
    assert called == "['cpu:0']"
    assert refused.startswith("launcher must be one of ") and "acme" in refused.partition(", got ")[0]
