"""Ends: a worker that is killed is named, training goes on from the last checkpoint, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.conformance.promise import promise
from rlcore.conformance.under_test import (
    GONE_S,
    UnderTest,
    descendants,
    mapped_shared_memory,
    new_train,
    same_weights,
    wait_until,
)
from rlcore.errors import UnsupportedError, WorkerDiedError
from rlcore.process.status import start_time


@pytest.fixture
def alone(under_test: UnderTest) -> Iterator[Any]:
    """An engine of this test's, whose worker has a process of its own."""
    under_test.release_processes()
    with new_train(under_test, launcher="process", devices=under_test.device_name(2)) as engine:
        yield engine


@promise("A worker that dies in the middle of a step is named within seconds; restart() goes on.", "train_step")
def test_a_killed_worker_is_named_and_restarted(alone: Any, batch: Any, loss_fn: Any, tmp_path: Path) -> None:
    alone.train_batch(batch, loss_fn)
    expected = alone.initial
    try:
        alone.save(tmp_path / "checkpoint")
        expected = alone.state_dict()
    except UnsupportedError:
        """Then restart() begins with the folder's weights."""
    pid = alone.executors[0].workers[0].process_id
    os.kill(pid, signal.SIGSTOP)  # so that the call has not ended when the worker is killed
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"the worker of rank 0 \(.+\) .*during train_step\(\)"):
        alone.train_batch(batch, loss_fn)
    assert time.monotonic() - began < GONE_S, "its death was noticed late"
    killer.join()
    alone.restart()
    assert same_weights(alone.state_dict(), expected)
    alone.train_batch(batch, loss_fn)


@promise("close() leaves no process and no shared memory.", "close")
def test_nothing_is_left_of_an_engine(under_test: UnderTest, infer: Any, batch: Any, loss_fn: Any) -> None:
    under_test.release_processes()
    with new_train(under_test, launcher="process", devices=under_test.device_name(2)) as engine:
        engine.train_batch(batch, loss_fn)
        engine.sync_weights(infer)
        own = engine.executors[0].workers[0].process_id
        processes = {own: start_time(own)} | descendants(own)
        memory = mapped_shared_memory(processes) - mapped_shared_memory([os.getpid()])
    wait_until(
        lambda: not [pid for pid, began in processes.items() if began and start_time(pid) == began],
        "not all processes of the worker ended",
    )
    wait_until(lambda: not any(map(os.path.exists, memory)), "not all shared memory of the worker was removed")
