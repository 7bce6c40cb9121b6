"""Real vLLM is killed, and stopped, in each state of a weight sync: nobody waits longer, and a new one syncs again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.errors import RlcoreError

from .policy import GREEDY, PROMPTS, assert_same, fresh

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2000)]

DEADLINE_S, GRACE_S = 20.0, 30.0

STEPS = {
    "serving": ({"begin"}, "serving"),  # of the round; what the engine's state is afterwards
    "paused": ({"prepare", "open_staging_buffers", "open_offers"}, "serving"),
    "moving": ({"unpack", "pull"}, "poisoned"),
    "voting": ({"ready"}, "poisoned"),  # a call of its own on this route
    "committing": ({"commit"}, "poisoned"),
}


def signal_at(patch: pytest.MonkeyPatch, group: WorkerGroup, steps: set[str], number: int) -> None:
    """The replica gets a signal as it is asked for the first of these steps."""
    call, pid = WorkerGroup.call, group.workers[0].process_id
    sent = []

    def signalling(self: WorkerGroup, method: str, calls: Any, *args: Any, **kwargs: Any) -> Any:
        if self is group and method == "sync_call" and calls[0][0][0] in steps and not sent:
            sent.append(os.kill(pid, number))
        return call(self, method, calls, *args, **kwargs)

    patch.setattr(WorkerGroup, "call", signalling)


def assert_synced(train: rlcore.TrainEngine, infer: rlcore.InferenceEngine, folder: Path) -> None:
    train.sync_weights(infer)
    assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, folder))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", STEPS)
def test_a_replica_that_is_lost_in_a_sync(  # noqa: PLR0917
    step: str,
    number: signal.Signals,
    infer: rlcore.InferenceEngine,
    train: rlcore.TrainEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, state = STEPS[step]
    if step == "paused":
        infer.restart()  # plans are made and routes are opened with a new one only
    train.scale(1.01)
    started = time.monotonic()
    with monkeypatch.context() as patch:
        signal_at(patch, infer.executors[0], steps, number)
        with pytest.raises(RlcoreError, match=r"rank 0 \(\w+:0\)") as caught:
            train.sync_weights(infer, route="packed" if step == "voting" else None, timeout_s=DEADLINE_S)
    seconds = time.monotonic() - started
    print(f"{step}, {number.name}: {seconds:.1f} s, {infer.sync_state}: {str(caught.value).splitlines()[0]}")
    assert seconds < DEADLINE_S + GRACE_S
    assert infer.sync_state == state
    with pytest.raises(RlcoreError):
        infer.generate(PROMPTS, GREEDY)
    train.scale(1.01)  # the trainer lives on
    assert_synced(train, infer.restart(), tmp_path)


def test_a_replica_that_is_killed_after_a_commit(
    infer: rlcore.InferenceEngine, train: rlcore.TrainEngine, tmp_path: Path
) -> None:
    train.sync_weights(infer)
    os.kill(infer.executors[0].workers[0].process_id, signal.SIGKILL)
    with pytest.raises(RlcoreError, match=r"rank 0 \(\w+:0\) was killed by SIGKILL"):
        infer.generate(PROMPTS, GREEDY)
    train.scale(1.01)
    assert_synced(train, infer.restart(), tmp_path)


def test_a_replica_that_stops_while_it_generates(
    model_folder: Path, build_vllm: Callable[..., rlcore.InferenceEngine], train: rlcore.TrainEngine, tmp_path: Path
) -> None:
    with build_vllm(model_folder) as infer:
        train.sync_weights(infer)
        infer.executors[0]._timeout_s = 10.0
        os.kill(infer.executors[0].workers[0].process_id, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RlcoreError, match=r"rank 0 \(\w+:0\)"):
            infer.generate(PROMPTS, GREEDY)
        assert time.monotonic() - started < 10 + GRACE_S
        assert_synced(train, infer.restart(), tmp_path)
