"""Of errors that come together the one that is raised."""

from __future__ import annotations

import pytest

from rlcore.engines.launchers.group import _cause
from rlcore.errors import CollectiveError, WorkerDiedError, WorkerError

USER = ("/home/user/train.py", "step")
TORCH = ("/venv/torch/distributed/distributed_c10d.py", "all_reduce")
HOOKS = ("/venv/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "_pre_forward")
DIED = WorkerDiedError(rank=9, device="cpu", method="step", how="was killed by SIGKILL")


def failed(*frames: tuple[str, str]) -> WorkerError:
    """The error of a worker that was at the last of ``frames``."""
    lines = "".join(f'  File "{file}", line 3, in {name}\n    {name}()\n' for file, name in frames)
    text = f"Traceback (most recent call last):\n{lines}RuntimeError: planted\n"
    return WorkerError(rank=0, device="cpu", method="step", error="RuntimeError: planted", traceback=text)


CAUSES = {
    "a user's error": failed(USER),
    "in a hook of FSDP": failed(HOOKS, USER),
    "one of rlcore's own": CollectiveError("planted"),
}


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_an_error_from_inside_torch_distributed_is_the_last_to_be_blamed(cause: Exception) -> None:
    """It tells only that another rank has gone."""
    assert _cause({0: failed(USER, TORCH), 1: cause, 2: failed(TORCH)}) is cause


def test_a_death_comes_before_all_others() -> None:
    assert _cause({0: failed(USER), 1: failed(USER, TORCH), 2: DIED}) is DIED


def test_of_those_that_are_alike_the_first_is_the_cause() -> None:
    first, second = failed(USER, TORCH), failed(USER, TORCH)
    assert _cause({0: first, 1: second}) is first
    assert _cause({1: (own := failed(USER)), 2: failed(USER)}) is own
