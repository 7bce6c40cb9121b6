"""``rlcore trace``: it runs a program as it is, and reports on it however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlcore.cli import main as cli
from rlcore.engines import runtime
from rlcore.errors import InvalidInputError
from rlcore.trace.events import read_trace
from tests.trace.test_trace_report import rolled_out
from tests.warm import ENGINES, LIMIT_S, run_warm, warm, without_settings

PROGRAM = """
import os, signal, sys, time
import rlcore
with rlcore.span("rewards"):
    print("argument", sys.argv[1])
{then}
"""


def traced(tmp_path: Path, then: str, *options: str) -> Any:
    (tmp_path / "program.py").write_text(PROGRAM.format(then=then))
    return run_warm(
        ["-m", "rlcore", "trace", "-o", "here", *options, "program.py", "--option"],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_program_runs_with_its_arguments_and_is_reported(tmp_path: Path) -> None:
    done = traced(tmp_path, "sys.exit(3)")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("argument --option\nWhere a step's time goes\n")
    assert "of that: rewards" in done.stdout and "here/trace.html: open it in a browser" in done.stdout
    assert (tmp_path / "here/trace.html").is_file() and (tmp_path / "here/trace.json").is_file()
    again = traced(tmp_path, "")
    assert again.returncode == 1 and "here holds a trace already; give another --output" in again.stderr


def test_a_trace_does_not_begin_where_its_report_would_replace_another_file(tmp_path: Path) -> None:
    (tmp_path / "trace.html").write_text("years of work")
    program = ["sh", "-c", f"touch {tmp_path / 'ran'}"]
    with pytest.raises(InvalidInputError, match=r"trace\.html was not written by rlcore trace"):
        CliRunner().invoke(cli.app, ["trace", "-o", str(tmp_path), *program], catch_exceptions=False)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("trace.html", "years of work")]


def test_a_picture_replaces_no_file_unless_that_is_asked_for(tmp_path: Path) -> None:
    rolled_out(tmp_path / "run", waits_ms=5)
    picture = tmp_path / "a.svg"
    picture.write_text("years of work")
    command = ["trace", "--report", str(tmp_path / "run"), "--picture", str(picture)]
    with pytest.raises(InvalidInputError, match=r"--picture .*a\.svg exists; give another file, or --force to replace"):
        CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert picture.read_text() == "years of work"
    assert CliRunner().invoke(cli.app, [*command, "--force"]).stdout == f"{picture}\n"
    assert "<svg" in picture.read_text()


def test_a_program_that_is_killed_is_reported(tmp_path: Path) -> None:
    done = traced(tmp_path, 'rlcore.span("amid this").__enter__(); os.kill(os.getpid(), signal.SIGKILL)')
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "note: the program " in done.stdout and " ended, or goes on, amid amid this" in done.stdout


def test_ctrl_c_ends_the_program_and_then_comes_the_report(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(then="time.sleep(600)"))
    with subprocess.Popen(
        [*warm(), "-m", "rlcore", "trace", "-o", "here", "program.py", "x"],
        cwd=tmp_path,
        env=without_settings() | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "argument x\n"
        (path,) = (tmp_path / "here").glob("spans-*.jsonl")
        os.kill(json.loads(path.read_text().splitlines()[0])["pid"], signal.SIGINT)  # the program's share of a Ctrl-C
        out, errors = command.communicate(timeout=LIMIT_S)
    assert command.returncode in (130, 1), errors
    assert "KeyboardInterrupt" in errors and "Where a step's time goes" in out


def test_a_program_without_rlcore_has_noted_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"true ended with exit code 0 and noted nothing: it built no engine of"
    ):
        CliRunner().invoke(cli.app, ["trace", "-o", str(tmp_path), "true"], catch_exceptions=False)
    failed = CliRunner().invoke(cli.app, ["trace", "-o", str(tmp_path), "sh", "-c", "exit 130"])
    assert failed.exit_code == 130 and failed.stdout == ""
    assert failed.stderr.startswith("rlcore: sh ended with exit code 130 and noted nothing: ")


def test_init_traces_the_program_and_reports_at_its_end(tmp_path: Path) -> None:
    program = 'import rlcore; rlcore.init(trace="here")\nwith rlcore.span("work"): pass'
    done = run_warm(program, cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "here/trace.html: open it in a browser" in done.stdout
    assert [span.name for span in read_trace(tmp_path / "here").spans] == ["work"]


def test_a_rank_that_is_not_the_first_and_a_fork_report_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(runtime.subprocess, "run", lambda *given, **_: started.append(given))
    runtime._report_trace(tmp_path, os.getpid() + 1)
    monkeypatch.setenv("RANK", "1")
    runtime._report_trace(tmp_path, os.getpid())
    assert started == []
    monkeypatch.setenv("RANK", "0")
    runtime._report_trace(tmp_path, os.getpid())
    assert len(started) == 1


QUICKSTART = """
import sys
from rlcore.quickstart import run, task
run.ASKED, run.PROMPTS, run.SAMPLES, run.EVERY = 12, 8, 4, 2
run.GATE_ACCURACY, run.MAX_IMITATION_STEPS, run.IMITATION_BATCH, run.WARM_UP = 2.0, 2, 32, 1
task.reward = lambda problem, text: float(text[:1] in tuple("02468"))
from rlcore.cli.main import main
main()
"""


@pytest.mark.slow
def test_the_first_steps_of_the_quickstart_have_spans_of_every_worker(tmp_path: Path) -> None:
    environment = {"RLCORE_TRACE": str(tmp_path / "here"), "RLCORE_CACHE": str(tmp_path), "RLCORE_TRACE_KERNELS": "1"}
    (tmp_path / "quickstart.py").write_text(QUICKSTART)
    command = ["quickstart.py", "quickstart", "--device", "cpu", "--launcher", "process", "--steps", "4"]
    done = run_warm(command, cwd=tmp_path, env=environment, modules=ENGINES)
    assert done.returncode == 0, done.stderr
    report = run_warm(["-m", "rlcore", "trace", "--report", "here"], cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    trace = read_trace(tmp_path / "here")
    assert len(trace.processes) == 2 and trace.notes == []
    engines = {(span.facts["engine"], span.facts["rank"]) for span in trace.spans if span.is_of_worker}
    assert engines == {("the train engine", 0), ("the inference engine", 0)}
    asked = {(call.name, call.facts.get("tag")) for call in trace.calls}
    moves = {("onload", "optimizer"), ("offload", "optimizer"), ("onload", "weights"), ("offload", "weights")}
    others = {(name, None) for name in ("generate", "score", "train_step", "sync_weights", "save", "export")}
    assert moves | others <= asked
    assert not [span for span in trace.spans if span.is_unfinished]
    assert "offload optimizer" in report.stdout and "train_batch on cpu:0: operators of the host" in report.stdout


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_what_it_did(tmp_path: Path) -> None:
    program = """
import os, signal, sys
import rlcore
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.executors.worker import Worker
import cloudpickle
class Dies(Worker):
    def train_step(self, number: int) -> int:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number
cloudpickle.register_pickle_by_value(sys.modules["__main__"])
group = start_workers(Dies, "the train engine", ["cpu:0"], launcher="process", timeout_s=60.0)
for number in range(3):
    group.call("train_step", [((number,), {})])
"""
    done = run_warm(program, cwd=tmp_path, env={"RLCORE_TRACE": str(tmp_path / "here")})
    assert "WorkerDiedError" in done.stderr
    trace = read_trace(tmp_path / "here")
    steps = [span for span in trace.spans if span.name == "train_step"]
    assert [(span.kind, span.is_unfinished) for span in steps if span.is_of_worker] == [
        ("worker", False),
        ("worker", False),
        ("worker", True),
    ]
    assert [span.facts.get("error") for span in steps if span.is_call] == [None, None, "WorkerDiedError"]
