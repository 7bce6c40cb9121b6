"""What workers print, on the user's stderr."""

from __future__ import annotations

import io
import logging
import re
import sys
from typing import Any

import cloudpickle
import pytest

from rlcore.engines.launchers import logs
from rlcore.engines.launchers.launch import choose_launcher
from rlcore.engines.launchers.logs import LogMerger
from rlcore.engines.launchers.worker import WorkerContext

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def speak(self) -> None:
        print("the same on all ranks")
        print(f"rank {self.context.rank} has {'a' if self.context.rank else 'no'} friend")
        logging.getLogger("rlcore.test").info("loaded the model")
        logging.getLogger("rlcore.test").warning("the model is old")
        logging.getLogger("another.library").info("not asked for")
        for percent in (10, 50, 100):
            print(f"\r{percent}%", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        print("this is all")

    def say_last_words(self) -> None:
        sys.stdout.write("the end, without a newline")

    def close(self) -> None:
        pass


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_carry_rank_and_device_and_the_same_of_many_ranks_comes_once(
    join_group: Any, errors: io.StringIO, wait_until: Any
) -> None:
    with join_group(Worker, 2) as group:
        group.call("speak", [((), {})] * 2)
        wait_until(lambda: errors.getvalue().count(" friend\n") == 2 and "this is all" in errors.getvalue())
    said = errors.getvalue().splitlines()
    by_all = [re.sub(r"^\[(0 cpu:4|1 cpu:5)\] ", "", line) for line in said]  # by whichever is read first
    assert by_all.count("the same on all ranks") == 1
    assert "[0 cpu:4] rank 0 has no friend" in said and "[1 cpu:5] rank 1 has a friend" in said
    assert by_all.count("rlcore.test WARNING the model is old") == 1
    assert not [line for line in said if "loaded the model" in line], "by default there are warnings"
    assert [line for line in by_all if "%" in line] == ["100%"], "in a file a progress bar is its last state"


@pytest.mark.parametrize("errors", [Terminal], indirect=True)
def test_progress_bars_survive_on_a_terminal(join_group: Any, errors: io.StringIO, wait_until: Any) -> None:
    with join_group(Worker) as group:
        group.call("speak", [((), {})])
        wait_until(lambda: "this is all\n" in errors.getvalue())
    assert "[0 cpu:4] 10%\r[0 cpu:4] 50%\r[0 cpu:4] 100%\n" in errors.getvalue()


@pytest.mark.slow
def test_the_log_level_reaches_workers_and_their_last_words_are_not_lost(
    start_group: Any, errors: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_LOG_LEVEL", "INFO")
    with start_group(Worker) as group:
        group.call("speak", [((), {})])
        group.call("say_last_words", [((), {})])
    said = errors.getvalue().splitlines()
    assert "[0 cpu:0] rlcore.test INFO loaded the model" in said
    assert not [line for line in said if "not asked for" in line], "the level is rlcore's"
    assert said[-1] == "[0 cpu:0] the end, without a newline"


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
