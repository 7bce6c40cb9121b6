"""Ends: a worker that is killed is named, an engine is started again, and nothing is left of one that is closed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlcore.conformance.promise import promise
from rlcore.conformance.reference import SamplerTruth
from rlcore.conformance.under_test import GONE_S, UnderTest, descendants, mapped_shared_memory, wait_until
from rlcore.errors import StateError, WorkerDiedError
from rlcore.process.status import start_time

PARAMS = {"max_tokens": 8, "ignore_eos": True, "seed": 3}


@pytest.fixture
def alone(under_test: UnderTest) -> Iterator[Any]:
    """An engine of this test's, whose worker has a process of its own."""
    under_test.release_processes()
    with under_test.inference(launcher="process", devices=under_test.device_name(2)) as engine:
        yield engine


@promise(
    "A worker that dies in the middle of a call is named within seconds; restart() brings another one.", "generate"
)
def test_a_killed_worker_is_named_and_restarted(alone: Any, prompts: Any, truth: SamplerTruth) -> None:
    pid = alone.executors[0].workers[0].process_id
    os.kill(pid, signal.SIGSTOP)  # so that the call has not ended when the worker is killed
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"the worker of rank 0 \(.+\) .*during generate\(\)"):
        alone.generate(prompts, PARAMS)
    assert time.monotonic() - began < GONE_S, "its death was noticed late"
    killer.join()
    assert alone.restart().version == 0
    assert truth.wrong(alone.generate(prompts, PARAMS | {"n": 2})) == ""


@promise("close() leaves no process and no shared memory.", "close")
def test_nothing_is_left_of_an_engine_apart(under_test: UnderTest, train: Any, prompts: Any) -> None:
    under_test.release_processes()
    with under_test.inference(launcher="process", devices=under_test.device_name(2)) as engine:
        engine.generate(prompts, PARAMS)
        train.sync_weights(engine)  # which may open and make shared memory
        own = engine.executors[0].workers[0].process_id
        processes = {own: start_time(own)} | descendants(own)
        memory = mapped_shared_memory(processes) - mapped_shared_memory([os.getpid()])
    wait_until(
        lambda: not [pid for pid, began in processes.items() if began and start_time(pid) == began],
        "not all processes of the worker ended",
    )
    wait_until(lambda: not any(map(os.path.exists, memory)), "not all shared memory of the worker was removed")


@promise("close() leaves no process and no thread in the program, and closing twice does nothing.", "close")
def test_nothing_is_left_in_the_program(under_test: UnderTest, infer: Any, prompts: Any) -> None:
    before = set(descendants(os.getpid()))
    engine = under_test.inference()
    engine.generate(prompts, PARAMS)
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="is closed"):
        engine.generate(prompts, PARAMS)
    wait_until(lambda: not set(descendants(os.getpid())) - before, "not all processes of the engine ended")
    assert len(infer.generate(prompts, PARAMS)) == len(prompts), "another engine of this executor goes on"
