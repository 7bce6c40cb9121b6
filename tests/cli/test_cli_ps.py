"""``rlcore ps``: the user's worker processes, from another terminal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rlcore.cli import main as cli
from rlcore.engines.launchers.ray import cluster
from rlcore.errors import DeviceError
from tests.warm import warm

PROGRAM = """
import os, time
from rlcore.engines.launchers.launch import start_workers

class Worker:
    def __init__(self, context):
        pass
    def wait(self):
        time.sleep(300)
    def close(self):
        pass

groups = [start_workers(Worker, f"the {kind} engine", ["cpu:2"], launcher="process", timeout_s=60)
          for kind in ("train", "inference")]
print(os.getpid(), groups[0].workers[0].process_id, flush=True)
groups[0].call("wait", [((), {})])
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """The command, the process id of its program, and that of its worker."""
    with subprocess.Popen(
        [*warm(), "-c", PROGRAM],
        env=os.environ | {"RLCORE_RUNTIME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, *map(int, process.stdout.readline().split())
        process.kill()


def test_ps_lists_and_ends_a_worker(program: Any, run_python: Any, tmp_path: Path) -> None:
    process, parent, worker = program
    here = {"RLCORE_RUNTIME": str(tmp_path)}
    (listed,) = json.loads(run_python(["-m", "rlcore", "ps", "--json"], env=here).stdout)
    assert 50 << 20 < listed.pop("resident_bytes") < 4 << 30
    assert 0 < listed.pop("age_s") < 600
    engines = ["the inference engine", "the train engine"]
    assert listed == {"pid": worker, "parent": parent, "device": "cpu:2", "engines": engines}
    table = run_python(["-m", "rlcore", "ps"], env=here).stdout
    assert str(worker) in table and "cpu:2" in table and "the inference engine, the train engine" in table

    wrong = run_python(["-m", "rlcore", "ps", "--kill", str(parent)], env=here)
    assert wrong.returncode == 1
    assert wrong.stderr == f"rlcore: no worker process has the id {parent}; living: [{worker}]\n"

    ended = run_python(["-m", "rlcore", "ps", "--kill", str(worker)], env=here)
    assert ended.returncode == 0 and str(worker) in ended.stdout
    assert process.wait(120) == 1
    assert "WorkerDiedError: the worker of rank 0 (cpu:2) was killed by SIGKILL" in process.stderr.read()
    assert json.loads(run_python(["-m", "rlcore", "ps", "--json"], env=here).stdout) == []


@pytest.mark.slow
def test_ps_tidies_up_after_a_killed_program(program: Any, run_python: Any, tmp_path: Path) -> None:
    process, parent, worker = program
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} >= {"store"}
    os.kill(parent, signal.SIGKILL)
    process.wait()
    while Path(f"/proc/{worker}").exists():  # which hears of its parent's end
        time.sleep(0.02)
    assert json.loads(run_python(["-m", "rlcore", "ps", "--json"], env={"RLCORE_RUNTIME": str(tmp_path)}).stdout) == []
    assert list(tmp_path.iterdir()) == []


def test_a_runtime_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rlcore.engines.launchers.running import running_processes
    from rlcore.errors import StateError

    monkeypatch.setenv("RLCORE_RUNTIME", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(StateError, match=f"{tmp_path} belongs to another user; set RLCORE_RUNTIME"):
        running_processes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 200_000,
        b'{"x":' * 200_000,
        b"\xff",
        b'{"pid":7,"started":1,"parent":1,"device":"\xff","engines":[]}',
    ],
    ids=["empty", "deep lists", "deep objects", "no JSON", "no UTF-8"],
)
def test_a_record_that_is_none_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes) -> None:
    from rlcore.engines.launchers.running import running_processes
    from rlcore.engines.launchers.runtime_files import record_name

    tmp_path.chmod(0o700)
    monkeypatch.setenv("RLCORE_RUNTIME", str(tmp_path))
    (tmp_path / record_name(7)).write_bytes(data)
    assert running_processes() == []


@pytest.mark.parametrize("command", [["plan", "--train", "1"], ["ps"]])
def test_without_a_cluster_the_only_line_is_the_commands_own(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray's library in C++ writes to the descriptor, and waits for minutes where nobody listens."""

    def init(address: str, **_: object) -> None:
        assert address == "auto"
        os.write(2, b"gcs_client.cc:210: Failed to get cluster ID\n")
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(cluster, "_import_ray", lambda: SimpleNamespace(init=init))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{silent.getsockname()[1]}"
        for address, told in (("auto", "nobody is there"), (closed, "[Errno 111] Connection refused")):
            found = CliRunner().invoke(cli.app, [*command, "--address", address])
            assert isinstance(found.exception, DeviceError)
            expected = f"no Ray cluster can be joined at {address!r}: {told}; start one with `ray start --head`, or "
            assert str(found.exception).startswith(expected)
    assert capfd.readouterr() == ("", "")
