"""The measurements of GPUs are commands that exist; they are run, ended and left out as their file says."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from rlcore.bench.case import load_cases
from rlcore.cli.main import app
from rlcore.process.status import state_of
from tests.evidence.__main__ import JOBS, Free, Job, Outcome, main, read_jobs, run, visible_gpus

ROOT = JOBS.parent.parent.parent
CORES = sorted(os.sched_getaffinity(0))


def test_each_job_is_a_call_that_its_program_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, stub = read_jobs(JOBS, []), tmp_path / "python"
    assert len({job.name for job in jobs}) == len(jobs)
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stub.chmod(0o755)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed_only)
    for job in jobs:
        shell = ["bash", "-euo", "pipefail", "-c", job.command.format(python=stub, out=tmp_path / "out")]
        for line in subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines():
            try:
                check_call(json.loads(line), str(stub), monkeypatch)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{job.name}: {line}") from error


class ParsedError(Exception):
    """The arguments are understood."""


_parse, _inside = argparse.ArgumentParser.parse_known_args, list[argparse.ArgumentParser]()


def parsed_only(parser: argparse.ArgumentParser, words: Any = None, namespace: Any = None) -> Any:
    """Parse, and raise ParsedError at the end of it: nothing is run."""
    _inside.append(parser)
    found = _parse(parser, words, namespace)
    _inside.pop()
    if _inside:  # it is a subcommand's
        return found
    assert not found[1], f"it takes no {found[1]}"
    raise ParsedError


def check_call(words: list[str], python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless a program understands these words, and what they name is there. Nothing is run."""
    assert words.pop(0) == "-m"
    module, *arguments = words
    if module == "rlcore":
        check_command(arguments, python, monkeypatch)
    elif module == "pytest":
        check_tests(arguments)
    elif main := getattr(importlib.import_module(module), "main", None):
        parameters = inspect.signature(main).parameters.values()
        if any(one.default is not None for one in parameters):  # it gets the words as they are
            inspect.signature(main).bind(*arguments)
            return
        assert hasattr(importlib.import_module(module), "argparse"), "else main() would begin"
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(ParsedError):
            main()


def check_command(arguments: list[str], python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if python in arguments:  # rlcore trace
        arguments, inner = arguments[: arguments.index(python)], arguments[arguments.index(python) + 1 :]
        check_call(inner, python, monkeypatch)
        arguments.append("a.py")
    command, cases = get_command(app), load_cases()
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    given = command.make_context("rlcore", arguments).params
    for name in given.get("names") or ():
        assert any(case == name or case.startswith(f"{name}/") for case in cases), name


def check_tests(arguments: list[str]) -> None:
    paths = [ROOT / word for word in arguments if word.startswith("tests/")]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    assert all(path.exists() for path in paths)
    tests = re.findall(r"^def (test_\w+)", "\n".join(file.read_text() for file in files), re.MULTILINE)
    if "-k" in arguments:
        for word in arguments[arguments.index("-k") + 1].split(" or "):
            assert any(word in test for test in tests), word


def job(name: str, command: str, **needs: Any) -> Job:
    return Job(name, command, **{"seconds": 30, "gpus": 0, "cores": 1} | needs)


def test_jobs_share_the_machine_and_what_does_not_run_says_why(tmp_path: Path) -> None:
    free = Free(["0", "1"], CORES[:1], {"": "python", "vllm": "/envs/vllm/bin/python"})
    show = "echo {python} $CUDA_VISIBLE_DEVICES; taskset -cp $$; echo x > {out}/record"
    jobs = [
        job("two", show, gpus=2),
        job("vllm", show, gpus=1, environment="vllm"),
        job("sglang", show, environment="sglang"),
        job("three", show, gpus=3),
        job("long", show, seconds=3601),
        job("wrong", "false | true"),
    ]
    found = {one.name: one.outcome for one in run(jobs, free, tmp_path, minutes=60)}
    assert found == {
        "two": "done",
        "vllm": "done",
        "sglang": "not begun: it needs --python sglang=INTERPRETER",
        "three": "not begun: it needs 3 GPUs and 1 processors; there are 2 and 1",
        "long": "not begun: 3601 s do not fit into what is left",
        "wrong": "failed (1)",
    }
    logs = {name: (tmp_path / name / "log").read_text().splitlines() for name in ("two", "vllm")}
    assert logs["two"][0] == "python 0,1" and logs["vllm"][0] == "/envs/vllm/bin/python 0"
    assert logs["vllm"][1].endswith(f": {CORES[0]}")
    assert (tmp_path / "two" / "record").exists()
    assert sorted(free.gpus) == ["0", "1"] and free.cores == CORES[:1]


def test_a_job_that_has_to_be_alone_has_nothing_beside_it_and_is_not_overtaken(tmp_path: Path) -> None:
    spans = tmp_path / "spans"
    show = f"echo begin $0 >> {spans}; sleep 0.4; echo end $0 >> {spans}"
    jobs = [job(name, f"bash -c {shlex.quote(show)} {name}", alone=name == "b") for name in "abcd"]
    found = run(jobs, Free([], [*CORES, *CORES, *CORES], {"": "python"}), tmp_path / "out", minutes=60)
    assert {one.outcome for one in found} == {"done"}
    lines = spans.read_text().splitlines()
    assert lines[:4] == ["begin a", "end a", "begin b", "end b"]
    assert sorted(lines[4:6]) == ["begin c", "begin d"]


def test_what_takes_more_memory_than_a_gpu_has_is_left_out(tmp_path: Path) -> None:
    free = Free(["0"], CORES[:1], {"": "python"}, memory_gb=85.5)
    jobs = [job("large", "true", gpus=1, memory_gb=130), job("small", "true", gpus=1)]
    found = {one.name: one.outcome for one in run(jobs, free, tmp_path, minutes=60)}
    assert found == {"large": "not begun: it takes 130 GB of a GPU; there are 86", "small": "done"}


def test_the_least_memory_of_the_gpus_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == (["0", "1"], pytest.approx(85.5, abs=0.1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus()[0] == ["1"]
    monkeypatch.setenv("PATH", "")
    assert visible_gpus() == (["1"], math.inf)


def test_a_job_over_its_time_is_ended_with_what_it_started(tmp_path: Path) -> None:
    command = f"echo begun; sleep 300 & echo $! > {tmp_path}/child; trap 'echo told; exit 0' TERM; wait"
    began = time.monotonic()
    [outcome] = run([job("endless", command, seconds=1)], Free([], CORES, {"": "python"}), tmp_path, minutes=1)
    assert outcome == Outcome("endless", "ended after 1 s", outcome.seconds)
    assert outcome.seconds >= 1 and time.monotonic() - began < 25
    assert (tmp_path / "endless" / "log").read_text() == "begun\ntold\n"
    until_gone(int((tmp_path / "child").read_text()))


def until_gone(pid: int) -> None:
    ends_at = time.monotonic() + 30
    while state_of(pid) not in ("", "Z"):
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def test_what_a_job_started_gets_time_to_keep_what_it_has_when_the_shell_has_ended(tmp_path: Path) -> None:
    keeps = "trap 'sleep 0.5; echo kept; exit 0' TERM; echo begun; while true; do sleep 0.05; done"
    run([job("two", f"bash -c {shlex.quote(keeps)}; true", seconds=3)], Free([], CORES, {"": "python"}), tmp_path, 1)
    assert (tmp_path / "two" / "log").read_text().endswith("kept\n")


GUARDED = """
import os, subprocess
from rlcore.process.guard import leave_guard
leave_guard(os.getppid(), lambda: None)
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
child.wait()
"""
PROGRAM = f"""
import os, subprocess, sys
from rlcore.process.guard import FAMILY
subprocess.run([sys.executable, "-c", {GUARDED!r}], env=os.environ | {{FAMILY: "planted"}}, start_new_session=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_the_runner_is_told_to_end(tmp_path: Path, number: int) -> None:
    """Not even what a worker has started in a session of its own, as vLLM does."""
    (tmp_path / "program.py").write_text(PROGRAM)
    file, log = tmp_path / "jobs.toml", tmp_path / "out" / "a" / "log"
    fields = {"name": "a", "command": f"{{python}} {tmp_path}/program.py", "seconds": 300, "gpus": 0, "cores": 1}
    file.write_text("[[job]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
    command = [sys.executable, "-m", "tests.evidence", str(tmp_path / "out"), "--file", str(file)]
    runner = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    ends_at = time.monotonic() + 60
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < ends_at and runner.poll() is None
        time.sleep(0.02)
    runner.send_signal(number)
    assert runner.wait(60) != 0
    for pid in map(int, log.read_text().split()):
        until_gone(pid)


def test_the_command_writes_what_became_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jobs.toml"
    file.write_text('[[job]]\nname = "a"\ncommand = "{python} --version"\nseconds = 30\ngpus = 0\ncores = 1\n')
    assert main([str(tmp_path / "out"), "--file", str(file)]) == 0
    assert [one["outcome"] for one in json.loads((tmp_path / "out" / "outcomes.json").read_text())] == ["done"]
    assert capsys.readouterr().out.split()[0] == "a"
    assert main([str(tmp_path / "named"), "--file", str(file), "--minutes", "0", "a"]) == 1
    assert "30 s do not fit" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), "--file", str(file)])
    assert "out is there; give a new folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="there is no job 'b'; these are: a"):
        main([str(tmp_path / "more"), "b", "--file", str(file)])
