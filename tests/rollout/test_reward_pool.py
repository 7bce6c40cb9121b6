"""Reward functions in processes: deadlines, deaths, and nothing left."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError
from rlcore.rollout import RewardPool


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
