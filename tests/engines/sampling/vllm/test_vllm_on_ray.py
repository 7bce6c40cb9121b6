"""A trainer and a real vLLM as workers on a host of a Ray cluster: syncs, and workers and agents that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

import rlcore
from rlcore.errors import WorkerDiedError

from . import policy
from .conftest import DEVICE
from .policy import GREEDY, PROMPTS, assert_same, fresh

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]
cloudpickle.register_pickle_by_value(sys.modules[policy.__name__])  # the workers cannot import that file

SOON_S = 60.0
"""On however busy a machine; an agent that is killed is noticed at once, one that is stopped after 10 s."""


@pytest.fixture(scope="module")
def host(_quick: None) -> Iterator[str]:
    """The name of the host of a local cluster, which is the launcher of this file's engines."""
    from rlcore.engines.launchers.ray.cluster import connect, disconnect

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        rlcore.init(launcher="ray")
    yield connect().hosts()[0].name
    rlcore.init()
    disconnect()


@pytest.fixture(scope="module")
def pair(
    host: str,
    model_folder: Path,
    build_train: Callable[..., rlcore.TrainEngine],
    build_vllm: Callable[..., rlcore.InferenceEngine],
) -> Iterator[tuple[rlcore.TrainEngine, rlcore.InferenceEngine]]:
    with contextlib.ExitStack() as stack:
        train = stack.enter_context(build_train(model_folder, devices=f"{host}/{DEVICE}"))
        yield train, stack.enter_context(build_vllm(model_folder, devices=None, colocate_with=train))


def assert_synced(train: rlcore.TrainEngine, infer: rlcore.InferenceEngine, folder: Path) -> None:
    started = time.monotonic()
    report = train.sync_weights(infer)
    print(f"sync by {report.route}: {time.monotonic() - started:.3f} s")
    assert report.route == ("packed" if DEVICE == "cpu:0" else "direct"), "two processes of one device"
    assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, folder))


def test_vllm_takes_new_weights_and_leaves_its_device_and_comes_back(
    pair: tuple[rlcore.TrainEngine, rlcore.InferenceEngine], host: str, tmp_path: Path
) -> None:
    train, infer = pair
    assert infer.devices == train.devices == [f"{host}/{DEVICE}"]
    before = infer.generate(PROMPTS, GREEDY)
    train.scale(1.01)
    assert_synced(train, infer, tmp_path / "first")
    assert infer.generate(PROMPTS, GREEDY) != before
    infer.meta()
    train.scale(1.01)
    infer.onload("weights")
    train.sync_weights(infer)
    infer.onload("kv_cache")
    assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "second"))


@pytest.mark.parametrize("killed", ["replica", "trainer"])
def test_a_worker_that_is_killed_is_told_of_at_once_and_a_new_one_is_synced(
    pair: tuple[rlcore.TrainEngine, rlcore.InferenceEngine], killed: str, tmp_path: Path
) -> None:
    train, infer = pair
    train.sync_weights(infer)
    lost = infer if killed == "replica" else train
    os.kill(lost.executors[0].workers[0].process_id, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match="was killed by SIGKILL"):
        train.sync_weights(infer, verify=True)
    assert time.monotonic() - started < SOON_S
    lost.restart()
    print(f"{killed}: restarted {time.monotonic() - started:.1f} s after it was killed")
    assert_synced(train, infer, tmp_path)


def test_an_agent_that_is_killed_ends_both_engines_and_a_new_one_starts_them_again(
    pair: tuple[rlcore.TrainEngine, rlcore.InferenceEngine], host: str, tmp_path: Path
) -> None:
    from rlcore.engines.launchers.ray.cluster import connect

    train, infer = pair
    train.sync_weights(infer)
    pids = [engine.executors[0].workers[0].process_id for engine in pair]
    os.kill(connect().link(host).facts.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=host):
        infer.generate(PROMPTS, GREEDY)
    with pytest.raises(WorkerDiedError, match=host):
        train.memory_report()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - started < SOON_S, "workers have outlived their agent"
        time.sleep(0.1)
    train.restart()
    infer.restart()
    print(f"agent: both restarted {time.monotonic() - started:.1f} s after it was killed")
    assert_synced(train, infer, tmp_path)
