"""The race's clock, its texts, and a side that fails. The sides themselves need vLLM and TRL, and run on a device."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlcore
from rlcore.bench.cases.peers import race, race_sides
from rlcore.errors import BenchError
from rlcore.process.python_command import python_command
from rlcore.process.status import start_time
from tests.warm import warm

pytest.importorskip("transformers")
LOAD = race.RaceLoad("", "cpu", vocabulary=50, prompts=2, samples=4, prompt_tokens=6, new_tokens=3, steps=3)


def test_phases_of_a_step_come_to_the_whole_and_the_first_step_is_left_out(tmp_path: Path) -> None:
    watch = race_sides.Stopwatch(rlcore.get_device("cpu"))
    for seconds in (0.2, 0.02, 0.02):
        watch.begin()
        with watch.phase("generate"):
            time.sleep(seconds)
        time.sleep(0.01)
        watch.end()
    watch.write(tmp_path / "times.json", parity=0.01)
    times = race.SideTimes(**json.loads((tmp_path / "times.json").read_text()))
    assert len(times.seconds) == 2 and times.phases.keys() == set(race.PHASES)
    for number, step in enumerate(times.seconds):
        of_phases = [spent[number] for spent in times.phases.values()]
        assert sum(of_phases) == pytest.approx(step)
        assert times.phases["generate"][number] >= 0.02 and times.phases["rest"][number] >= 0.01
    assert times.peak_bytes > 0
    found = race._quantities(times, LOAD.num_tokens)
    assert "sync" not in found, "a record takes no phase that the side has not"
    assert found["new_tokens"].value == [2 * 4 * 3 / seconds for seconds in times.seconds]


def test_the_text_of_a_token_is_its_number_and_a_reward_counts_even_ones(tmp_path: Path) -> None:
    tokenizer = race_sides._tokenizer(dataclasses.replace(LOAD, folder=str(tmp_path)))
    for prompt in race_sides._prompts(LOAD):
        assert tokenizer(" ".join(map(str, prompt)))["input_ids"] == prompt
        assert len(prompt) == LOAD.prompt_tokens
    assert race_sides._reward(tokenizer.decode([4, 7, 8, 12])) == 0.75


def test_a_side_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "python_command", lambda *entry: [*warm(), *python_command(*entry)[1:]])
    with pytest.raises(BenchError, match=re.escape("no_such_side ended with exit code 1: ")) as failed:
        race._run("no_such_side", LOAD, race.TimeLeft(60, 1))
    assert "no attribute 'no_such_side'" in str(failed.value)


def test_a_side_that_hangs_is_ended_and_the_next_has_the_time_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def hangs(command: Sequence[str], log: Path, timeout_s: float) -> int:
        log.write_text("at step 2")
        now[0] += timeout_s
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setattr(race, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(race, "_exit_code", hangs)
    left = race.TimeLeft(2.0, 2)
    with pytest.raises(BenchError, match=r"a_side did not end within the 1 s that it had: at step 2"):
        race._run("a_side", LOAD, left)
    assert left.next_share() == 1.0


def test_what_a_side_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of its own too, as workers are."""
    log = tmp_path / "log.txt"

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return waits(process)
        while not log.read_text().endswith("\n"):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("", timeout)

    waits = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(subprocess.TimeoutExpired):
        race._exit_code(["sh", "-c", "setsid sleep 60 & echo $!; exec sleep 60"], log, 60)
    started = int(log.read_text())
    for _ in range(1000):
        if start_time(started) is None:
            return
        time.sleep(0.01)
    os.kill(started, signal.SIGKILL)
    pytest.fail("what the side had started still runs")


def test_the_times_of_a_side_count_however_it_ends_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    times = race.SideTimes([1.0], {name: [0.1] for name in race.PHASES}, peak_bytes=1, parity=0.0)
    writes = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text(sys.argv[1]); sys.exit(134)"

    def command(entry: str, load: str, result: Path) -> list[str]:
        return [sys.executable, "-c", writes, json.dumps(dataclasses.asdict(times)), str(result)]

    monkeypatch.setattr(race, "python_command", command)
    assert race._run("a_side", LOAD, race.TimeLeft(60, 1)) == times
