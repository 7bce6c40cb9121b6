"""Reward functions in processes: deadlines, deaths, and nothing left."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rlcore.conformance.ends import wait_until
from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError
from rlcore.process.status import start_time
from rlcore.rollout import RewardPool
from tests.warm import warm

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from rlcore.rollout.reward_pool import RewardPool

def verify(file):
    other = subprocess.Popen(["sleep", "600"])
    Path(file).write_text(f"{os.getpid()} {other.pid}")
    return 1.0

RewardPool(1).submit(verify, sys.argv[1]).result(60)
os._exit(0)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids_in(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def wait_for_the_end_of(*pids: int) -> None:
    wait_until(lambda: not any(map(start_time, pids)), f"not all of {pids} ended")


def test_a_function_that_forks_keeps_its_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    """What it forks has the pipes of its process, unless they are closed there."""

    def verify(how: str, file: str) -> float:
        if how == "process":  # as those do that run the code of an answer
            process = multiprocessing.get_context("fork").Process(target=int)
            process.start()
            process.join()
            return 1.0
        if (pid := os.fork()) == 0:
            if how == "session":
                os.setsid()
            time.sleep(600)
        other = subprocess.Popen(["sleep", "600"])
        Path(file).write_text(f"{pid} {other.pid}")
        os.waitpid(pid, 0)
        return 0.0

    late, own, closed = (tmp_path / name for name in ("late", "own", "closed"))
    with RewardPool(1, timeout_s=60) as pool:
        for how, file in (("hang", late), ("session", own)):
            assert pool.submit(verify, "process", "").result(60) == 1.0
            pool._timeout_s = 0.3  # not before the process has begun
            with pytest.raises(RolloutTimeoutError, match=r"took longer than 0\.3 s"):
                pool.submit(verify, how, str(file)).result(20)
            pool._timeout_s = 60
        running = pool.submit(verify, "hang", str(closed))
        wait_until(lambda: len(pids_in(closed)) == 2, "the call did not begin")
    assert isinstance(running.exception(20), RolloutError)
    forked, other = pids_in(own)
    os.kill(forked, signal.SIGKILL)  # it has left the process group
    wait_for_the_end_of(*pids_in(late), other, *pids_in(closed))


def test_a_process_that_was_killed_while_idle_is_replaced_and_what_it_had_started_ends(tmp_path: Path) -> None:
    def verify(file: str) -> float:
        other = subprocess.Popen(["sleep", "600"])
        Path(file).write_text(f"{os.getpid()} {other.pid}")
        return 1.0

    with RewardPool(1, timeout_s=60) as pool:
        assert pool.submit(verify, str(tmp_path / "first")).result(60) == 1.0
        own, other = pids_in(tmp_path / "first")
        os.kill(own, signal.SIGKILL)
        (child,) = pool._children
        wait_until(lambda: not child.is_alive, "it still runs")
        assert pool.submit(verify, str(tmp_path / "second")).result(60) == 1.0
        wait_for_the_end_of(other)
    wait_for_the_end_of(*pids_in(tmp_path / "second"))


def test_what_a_function_has_started_ends_with_the_program(tmp_path: Path) -> None:
    subprocess.run([*warm(), "-c", PROGRAM, str(tmp_path / "pids")], check=True)
    wait_for_the_end_of(*pids_in(tmp_path / "pids"))


def test_a_function_that_hangs_is_ended_and_others_go_on() -> None:
    def verify(text: str, *, answer: int) -> Any:
        if text == "hang":
            while True:
                time.sleep(1)
        if text == "die":
            os._exit(3)
        if text == "pid":
            return os.getpid()
        if text == "text":
            return "no reward"
        return [int(text) == answer, 0.5]

    async def all_together() -> list[Any]:
        calls = [pool(verify, text, answer=7) for text in ("hang", "7", "x", "8", "die", "text", "7")]
        return await asyncio.gather(*calls, return_exceptions=True)

    with RewardPool(2, timeout_s=5) as pool:
        found = asyncio.run(all_together())
        assert [found[1], found[3], found[6]] == [[1.0, 0.5], [0.0, 0.5], [1.0, 0.5]]
        assert isinstance(found[0], RolloutTimeoutError) and pool.num_timeouts == 1
        assert str(found[0]) == "the reward function verify took longer than 5 s; its process was ended"
        assert str(found[2]).startswith("the reward function verify raised ValueError: invalid literal for int()")
        assert str(found[4]) == "the process of the reward function verify ended while it ran"
        assert "raised TypeError: a reward function must return a number or a list of numbers" in str(found[5])
        pids = {int(future.result()) for future in [pool.submit(verify, "pid", answer=0) for _ in range(4)]}
        assert pids and os.getpid() not in pids
        with pytest.raises(InvalidInputError, match="an argument cannot be sent to a process"):
            pool.submit(verify, (_ for _ in ()), answer=0)
        running = pool.submit(verify, "hang", answer=0)
        while not running.running():
            time.sleep(0.01)
    assert isinstance(running.exception(), RolloutError)
    assert not any(map(is_alive, pids))
    with pytest.raises(StateError, match="the RewardPool is closed"):
        pool.submit(len, "")
    with pytest.raises(InvalidInputError, match="takes a number of seconds above 0 as timeout_s, got 0"):
        RewardPool(timeout_s=0)
