"""What workers print, on the user's stderr."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

from rlcore.engines.launchers import logs
from rlcore.engines.launchers.launch import choose_launcher
from rlcore.engines.launchers.logs import LogMerger

PROGRAM = """
import logging, sys, time
from rlcore.engines.launchers.launch import start_workers

class Worker:
    def __init__(self, context):
        self.context = context
    def speak(self):
        print("the same on all ranks")
        print(f"rank {self.context.rank} has {'a' if self.context.rank else 'no'} friend")
        logging.getLogger("rlcore.test").info("loaded the model")
        logging.getLogger("another.library").info("not asked for")
        for percent in (10, 50, 100):
            print(f"\\r{percent}%", end="", file=sys.stderr, flush=True)
            time.sleep(0.02)
        print(file=sys.stderr)
        sys.stdout.write("the end, without a newline")
    def close(self):
        pass

group = start_workers(Worker, "the engine", ["cpu:0", "cpu:1"], launcher="process", timeout_s=100)
for worker in group.workers:
    worker.call("speak").result()
group.stop()
"""


def speak(terminal: bool = False, **variables: str) -> str:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, env=os.environ | variables) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # a terminal's end
                break
            if not data:
                break
            said += data
    os.close(ours)
    assert process.returncode == 0, said
    return said.decode()


def test_lines_carry_rank_and_device_and_the_same_of_many_ranks_comes_once() -> None:
    said = speak(RLCORE_LOG_LEVEL="INFO").splitlines()
    by_all = [re.sub(r"^\[(0 cpu:0|1 cpu:1)\] ", "", line) for line in said]  # by whichever is read first
    assert by_all.count("the same on all ranks") == 1
    assert "[0 cpu:0] rank 0 has no friend" in said and "[1 cpu:1] rank 1 has a friend" in said
    assert by_all.count("rlcore.test INFO loaded the model") == 1
    assert [line for line in said if line.endswith("the end, without a newline")], "the last words are not lost"
    assert not [line for line in said if "not asked for" in line], "the level is rlcore's"
    assert [line for line in by_all if "%" in line] == ["100%"], "in a file a progress bar is its last state"


def test_the_log_level_reaches_workers() -> None:
    assert "loaded the model" not in speak(RLCORE_LOG_LEVEL="WARNING")


def test_progress_bars_survive_on_a_terminal() -> None:
    said = speak(terminal=True)
    assert re.search(r"\[(0 cpu:0|1 cpu:1)\] 10%\r\[\1\] 50%\r\[\1\] 100%", said)


def test_a_line_is_swallowed_only_when_another_rank_repeats_it_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    merger = LogMerger(lambda: out)
    for label, text in [("0", "loss 1"), ("1", "loss 1"), ("0", "loss 1"), ("1", "loss 2")]:
        merger.line(label, text)
    now[0] = 100.0
    merger.line("1", "loss 1")
    assert out.getvalue().splitlines() == ["[0] loss 1", "[0] loss 1", "[1] loss 2", "[1] loss 1"]


def test_a_closed_stderr_does_not_stop_the_reading() -> None:
    out = io.StringIO()
    out.close()
    LogMerger(lambda: out).line("0", "nobody reads this")


@pytest.mark.parametrize(
    ("asked", "num_workers", "expected"),
    [(None, 1, "inline"), (None, 2, "process"), ("process", 1, "process"), ("inline", 1, "inline")],
)
def test_the_launcher_follows_the_number_of_workers(asked: Any, num_workers: int, expected: str) -> None:
    assert choose_launcher(asked, num_workers) == expected


def test_the_debugger_forces_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "pdb")
    assert choose_launcher("process", 1) == choose_launcher(None, 2) == "inline"
