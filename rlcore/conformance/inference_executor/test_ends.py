"""Ends: a worker that is killed is named, an engine is started again, and nothing is left of one that is closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from rlcore.conformance.ends import Belongings, check_killed_worker_is_named, descendants, wait_until
from rlcore.conformance.promise import promise
from rlcore.conformance.reference import SamplerTruth
from rlcore.conformance.under_test import UnderTest
from rlcore.errors import StateError

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
    check_killed_worker_is_named(alone, "generate", lambda: alone.generate(prompts, PARAMS))
    assert alone.restart().version == 0
    assert truth.wrong(alone.generate(prompts, PARAMS | {"n": 2})) == ""


@promise("close() leaves no process and no shared memory.", "close")
def test_nothing_is_left_of_an_engine_apart(under_test: UnderTest, train: Any, prompts: Any) -> None:
    under_test.release_processes()
    with under_test.inference(launcher="process", devices=under_test.device_name(2)) as engine:
        engine.generate(prompts, PARAMS)
        train.sync_weights(engine)  # which may open and make shared memory
        left = Belongings(engine)
    left.wait_until_gone()


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
