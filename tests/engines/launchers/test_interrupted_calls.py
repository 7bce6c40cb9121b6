"""A call whose caller leaves early, as with Ctrl-C: its worker is told, and whoever waits behind it learns of it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.messages import MessageHead
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import WorkerTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file

LONG_S = 100.0


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.was_given_up: list[bool] = []

    def work(self, seconds: float, *, looks: bool = True) -> bool:
        """So long, or until nobody waits for it."""
        self.context.emit("begun")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (looks and self.context.is_cancelled()):
            time.sleep(0.01)
        self.was_given_up.append(self.context.is_cancelled())
        return self.was_given_up[-1]

    def wait_for(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)

    def num_cancelled(self) -> list[int]:
        return [len(one._cancelled) for one in gc.get_objects() if type(one).__name__ == "WorkerServer"]

    def told(self) -> list[bool]:
        return self.was_given_up

    def close(self) -> None:
        pass


def ask(
    group: WorkerGroup, method: str, *args: Any, on_event: Callable[[Any], None] | None = None, **kwargs: Any
) -> list[Any]:
    return group.call(method, [(args, kwargs)] * len(group.workers), on_event)


def interrupt(_: Any) -> None:
    """Ctrl-C, as it comes in the thread that waits for the call."""
    os.kill(os.getpid(), signal.SIGINT)


def test_a_worker_is_told_that_its_caller_was_interrupted(join_group: Any) -> None:
    with join_group(Worker, 2) as group:
        assert ask(group, "work", 0.01) == [False, False]
        with pytest.raises(KeyboardInterrupt):
            ask(group, "work", LONG_S, on_event=interrupt)
        started = time.monotonic()
        assert ask(group, "told") == [[False, True]] * 2, "the workers live on"
        assert time.monotonic() - started < LONG_S / 2
        assert ask(group, "work", 0.01) == [False, False], "it is said of one call"


def test_an_answer_that_is_enough_lets_the_others_end_early(join_group: Any) -> None:
    with join_group(Worker, 2) as group:
        calls: Any = [((0.01,), {}), ((LONG_S,), {})]
        started = time.monotonic()
        assert group.call("work", calls, is_enough=lambda answer: answer is False) == [False, True], "none is lost"
        assert time.monotonic() - started < LONG_S / 2
        calls = [((0.01,), {}), ((0.2,), {})]
        assert group.call("work", calls, is_enough=lambda answer: answer is None) == [False, False]


def test_a_word_that_comes_too_late_is_not_kept(join_group: Any) -> None:
    with join_group(Worker) as group:
        ask(group, "work", 0.0)
        process = group.workers[0]._process
        process._outgoing.put((MessageHead("cancel", 0), b"", []))
        ask(group, "work", 0.0)
        assert ask(group, "num_cancelled") == [[0]]


def test_a_ctrl_c_that_does_not_end_the_wait_is_seen_soon(join_group: Any) -> None:
    """As one that comes between the interpreter's look at signals and its wait: another thread takes this one."""
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    with join_group(Worker) as group:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            ask(group, "work", LONG_S)
        assert time.monotonic() - started < LONG_S / 4


def interrupt_next_call(group: WorkerGroup) -> None:
    """Ctrl-C comes as soon as the call is sent, when its caller waits for answers."""
    wait = group._results

    def waits(*args: Any, **options: Any) -> list[Any]:
        del group._results  # type: ignore[method-assign]
        interrupt(None)
        return wait(*args, **options)

    group._results = waits  # type: ignore[method-assign]


def test_a_call_that_waits_is_given_up_before_it_runs(join_group: Any, tmp_path: Path) -> None:
    with join_group(Worker, engine="the first") as first, join_group(Worker, engine="the second") as second:
        answer = first.workers[0].call("wait_for", tmp_path / "word")
        interrupt_next_call(second)
        with pytest.raises(KeyboardInterrupt):
            ask(second, "work", LONG_S)
        (tmp_path / "word").touch()
        answer.result(LONG_S)
        assert ask(second, "told") == [[True]]


def test_what_a_listener_raises_gives_the_call_up_too(join_group: Any) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError("of the progress bar")

    with join_group(Worker) as group:
        with pytest.raises(ZeroDivisionError):
            ask(group, "work", LONG_S, on_event=fail)
        assert ask(group, "told") == [[True]]


@pytest.mark.slow
def test_an_earlier_call_that_does_not_look_is_named_by_the_one_behind_it(start_group: Any) -> None:
    with start_group(Worker) as group:
        interrupt_next_call(group)
        with pytest.raises(KeyboardInterrupt):
            group.call("work", [((LONG_S,), {"looks": False})], timeout_s=1.0)
        with pytest.raises(WorkerTimeoutError) as caught:
            ask(group, "work", 0.01)
        assert "it is an earlier call of the test engine; work() of the test engine waited behind it" in (
            caught.value.__notes__
        )
