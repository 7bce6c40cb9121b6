"""Of errors that come together the one that is raised; and how often a group looks at its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rlcore.engines.launchers.group import WorkerGroup
from rlcore.errors import CollectiveError, WorkerDiedError, WorkerError

USER = ("/home/user/train.py", "step")
TORCH = ("/venv/torch/distributed/distributed_c10d.py", "all_reduce")
HOOKS = ("/venv/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "_pre_forward")


def failed(*frames: tuple[str, str]) -> WorkerError:
    """The error of a worker that was at the last of ``frames``."""
    lines = "".join(f'  File "{file}", line 3, in {name}\n    {name}()\n' for file, name in frames)
    text = f"Traceback (most recent call last):\n{lines}RuntimeError: planted\n"
    return WorkerError(rank=0, device="cpu", method="step", error="RuntimeError: planted", traceback=text)


class Failing:
    """FAKE: a worker that fails, at once or as late as when its call is cancelled."""

    current = None

    def __init__(self, error: Exception, *, late: bool = False) -> None:
        self.error, self.late = error, late
        self.answer: Future[Any] = Future()

    def prepare(self, *_: Any, **__: Any) -> Callable[[], Future[Any]]:
        return lambda: self.answer if self.late else self.fail()

    def fail(self) -> Future[Any]:
        self.answer.set_exception(self.error)
        return self.answer

    def cancel(self, answer: Future[Any]) -> None:
        if not answer.done():
            self.fail()

    def kill(self, because: str) -> None: ...

    def join(self, timeout_s: float) -> bool:
        return True

    def ask_to_stop(self) -> None: ...


def raised(*workers: Failing) -> BaseException:
    group = WorkerGroup("the test engine", timeout_s=100.0)
    group.workers += workers
    with pytest.raises((WorkerError, CollectiveError)) as caught:
        group.call("step", [((), {})] * len(workers))
    return caught.value


CAUSES = {
    "a user's error": failed(USER),
    "in a hook of FSDP": failed(HOOKS, USER),
    "one of rlcore's own": CollectiveError("planted"),
}


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_an_error_from_inside_torch_distributed_is_the_last_to_be_blamed(cause: Exception) -> None:
    """It tells only that another rank has gone."""
    error = raised(Failing(failed(USER, TORCH)), Failing(cause, late=True), Failing(failed(TORCH)))
    assert error is cause
    assert [note.partition(":")[0] for note in error.__notes__] == ["rank 0 failed too", "rank 2 failed too"]


def test_a_death_comes_before_all_others() -> None:
    died = WorkerDiedError(rank=2, device="cpu", method="step", how="was killed by SIGKILL")
    assert raised(Failing(failed(USER)), Failing(failed(USER, TORCH)), Failing(died, late=True)) is died


def test_of_those_that_are_alike_the_first_is_the_cause() -> None:
    first, second = failed(USER, TORCH), failed(USER, TORCH)
    assert raised(Failing(first), Failing(second)) is first
    assert raised(Failing(failed(USER), late=True), Failing(own := failed(USER))) is own


def test_of_many_ranks_that_fail_seven_are_shown() -> None:
    error = raised(*(Failing(failed(USER)) for _ in range(10)))
    assert [note.partition(":")[0] for note in error.__notes__[:-1]] == [
        f"rank {rank} failed too" for rank in range(1, 8)
    ]
    assert error.__notes__[-1] == "and 2 other ranks failed too"


class Counted(Failing):
    """FAKE: a worker that has answered at once, and counts how often its present call is looked at."""

    looks = 0

    def fail(self) -> Future[Any]:
        self.answer.set_result(self)
        return self.answer

    @property
    def current(self) -> None:  # type: ignore[override]
        self.looks += 1


def test_answers_that_are_there_need_no_look_at_all_other_workers() -> None:
    """With a look for each answer the time of a call grew with the square of the number of workers."""
    group = WorkerGroup("the test engine", timeout_s=100.0)
    late = Counted(ValueError())
    late.prepare = lambda *_, **__: lambda: late.answer  # type: ignore[method-assign]
    group.workers += [Counted(ValueError()) for _ in range(99)] + [late]
    timer = threading.Timer(0.05, late.fail)
    timer.start()
    assert group.call("step", [((), {})] * 100) == group.workers
    timer.join()
    assert sum(worker.looks for worker in group.workers) <= 1
