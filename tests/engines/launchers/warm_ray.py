"""Ray on a "host" of tests/hosts.py whose Python processes, agents among them, are forks of one that has torch.

``ray start`` is told that `pythons_of` has the interpreter; it starts the processes of Ray with that. What an agent
starts is a fork of the agent as it was before Ray's threads, and a child of it as ever: see tests/warm.py.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.engines.launchers import worker_process
from rlcore.engines.launchers.ray.agent import Agent
from tests import warm_process
from tests.hosts import Host
from tests.warm import ENGINES, WarmPopen, fork_server, starting

# Not Ray itself: it reads the variables of a process when it is imported.
MODULES = (*(name for name in ENGINES if not name.startswith("matplotlib")), "click", "jsonschema", "requests")
PYTHON = "_WARM_PYTHON"
"""The variable with the path of the interpreter that Ray is told of."""
_WORKERS = "_WARM_WORKERS"
"""The variable of an agent with the folder of what its workers are forks of."""
_PROGRAM = str(Path(warm_process.__file__))


def pythons_of(hosts: Sequence[Host], shared: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Start what Python processes of the hosts are forks of; return the path of the interpreter of each."""
    found: dict[str, str] = {}
    started: list[subprocess.Popen[str]] = []
    kept = ["sh", "-c", 'sleep 1000000000 | exec "$@"', "sh"]  # it ends with its standard input, and so with the host
    for host in hosts:
        folder, path = shared / f"warm-{host.name}", shared / f"python-{host.name}"
        folder.mkdir()
        serving = [*kept, sys.executable, _PROGRAM, "serve", str(folder), *MODULES]
        started.append(host.start(serving, environment={**environment, **warm_process.room(is_larger=True)}))
        asking = f"{sys.executable} -IS {_PROGRAM} ask {folder} -m tests.engines.launchers.warm_ray"
        path.write_text(f'#!/bin/sh\nexec env {PYTHON}={path} {asking} "$@"\n')
        path.chmod(0o755)
        found[host.name] = str(path)
    for one in started:
        assert one.stdout is not None
        assert one.stdout.readline(), one.communicate()[1]
    return found


class _Popen(WarmPopen):
    def _folder(self) -> str:
        return os.environ[_WORKERS]


class WarmAgent(Agent):
    """The agent of such a host."""

    def __init__(self) -> None:
        worker_process.subprocess = starting(_Popen)  # type: ignore[assignment]
        super().__init__()


def main() -> None:
    """Run what an interpreter would: ``file arguments``, or ``-m module arguments``."""
    arguments = [one for one in sys.argv[1:] if one != "-u"]
    if arguments[0].endswith("default_worker.py"):
        os.environ[_WORKERS] = fork_server()
    else:
        sys.executable = os.environ[PYTHON]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
