"""Ends: a worker that is killed is named, training goes on from the last checkpoint, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.conformance.ends import Belongings, check_killed_worker_is_named
from rlcore.conformance.promise import promise
from rlcore.conformance.under_test import UnderTest, new_train, same_weights
from rlcore.errors import UnsupportedError


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
    check_killed_worker_is_named(alone, "train_step", lambda: alone.train_batch(batch, loss_fn))
    alone.restart()
    assert same_weights(alone.state_dict(), expected)
    alone.train_batch(batch, loss_fn)


@promise("close() leaves no process and no shared memory.", "close")
def test_nothing_is_left_of_an_engine(under_test: UnderTest, infer: Any, batch: Any, loss_fn: Any) -> None:
    under_test.release_processes()
    with new_train(under_test, launcher="process", devices=under_test.device_name(2)) as engine:
        engine.train_batch(batch, loss_fn)
        engine.sync_weights(infer)
        left = Belongings(engine)
    left.wait_until_gone()
