"""Real vLLM on two devices: tensor parallel workers, replicas that share the requests, and syncs to both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import InvalidInputError, RlcoreError, StateError, WorkerDiedError
from rlcore.process import guard

from .policy import GREEDY, PROMPTS, assert_same, fresh

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2000)]

KIND = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = [f"{KIND}:0", f"{KIND}:1"]
BuildVllm = Callable[..., rlcore.InferenceEngine]


@pytest.fixture(scope="module", autouse=True)
def _two_devices() -> None:
    if KIND == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, or none")


@pytest.fixture(scope="module")
def train(build_train: Callable[..., rlcore.TrainEngine], model_folder: Path) -> Iterator[rlcore.TrainEngine]:
    """A trainer whose weights are in two shards."""
    with build_train(model_folder, devices=BOTH, data_parallel_size=2, timeout_s=280) as engine:
        yield engine


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def shared_names(pid: int) -> list[Path]:
    """Return the names that a replica and vLLM's workers share."""
    files = guard.shared_memory([pid, *children(pid)])
    found = [path for path in Path("/dev/shm").iterdir() if path.name.startswith(guard.NAMED_MEMORY)]
    return [path for path in found if guard._file(path) in files]


def assert_gone(names: list[Path]) -> None:
    deadline = time.monotonic() + 120
    while left := [path.name for path in names if path.exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]


def test_two_tensor_parallel_workers(
    train: rlcore.TrainEngine, build_vllm: BuildVllm, model_folder: Path, tmp_path: Path
) -> None:
    with build_vllm(model_folder, devices=None, colocate_with=train, tensor_parallel_size=2, timeout_s=600) as infer:
        assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "first"))
        for version in (1, 2):
            train.scale(1.1)
            report = train.sync_weights(infer, verify=version == 2)
            assert (report.version, report.fallback_bytes) == (version, 0)
            assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / str(version)))
        infer.meta()
        infer.onload("weights")
        train.sync_weights(infer)
        infer.onload("kv_cache")
        assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "last"))

        replica = infer.executors[0].workers[0].process_id
        names = shared_names(replica)
        # Semaphores have names where workers are spawned; on a GPU vLLM may fork them.
        expected = {"psm", "sem"} if KIND == "cpu" else {"psm"}
        assert {path.name.partition("_")[0].partition(".")[0] for path in names} >= expected
        os.kill(next(pid for pid in children(replica) if "Worker" in title(pid)), signal.SIGKILL)
        train.scale(0.9)
        started = time.monotonic()
        with pytest.raises(RlcoreError):
            train.sync_weights(infer, timeout_s=60)
        assert time.monotonic() - started < 90
        train.scale(1.1)  # the trainer lives on
    assert_gone(names)


def test_a_lost_tensor_parallel_worker_is_named(build_vllm: BuildVllm, model_folder: Path) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    with build_vllm(model_folder, devices=BOTH, tensor_parallel_size=2, timeout_s=600) as infer:

        def kill(rank: int) -> None:
            (pid,) = (
                pid for pid in children(infer.executors[0].workers[0].process_id) if f"Worker_TP{rank}" in title(pid)
            )
            os.kill(pid, signal.SIGKILL)

        def lost(rank: int, method: str) -> Any:
            return pytest.raises(
                WorkerDiedError,
                match=rf"worker of rank 0 \({BOTH[0]}\) lost vLLM's VllmWorker-{rank} \(process \d+, tensor-parallel "
                rf"rank {rank}, {BOTH[rank]}\), which was killed by SIGKILL \(.*\), during {method}\(\)",
            )

        kill(0)
        with lost(0, "generate"):
            infer.generate(PROMPTS, long)
        with pytest.raises(StateError, match=r"call restart\(\)"):
            infer.generate(PROMPTS, GREEDY)

        infer.restart().submit(PROMPTS * 8, long)
        kill(1)
        with lost(1, "(submit|collect)"):
            while True:
                infer.collect(timeout_s=60)
        assert len(infer.restart().generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_replicas_on_all_that_is_left_share_the_requests(
    train: rlcore.TrainEngine, build_vllm: BuildVllm, model_folder: Path, tmp_path: Path
) -> None:
    with build_vllm(model_folder, devices=None, colocate_with=train, data_parallel_size=-1, timeout_s=600) as infer:
        assert [worker.context.device_name for worker in infer.executors[0].workers] == BOTH
        train.scale(0.95)
        report = train.sync_weights(infer)
        assert report.fallback_bytes == 0
        assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "one"))

        for method in (infer.generate, infer.submit):
            with pytest.raises(InvalidInputError, match="prompt 4 holds token id 999"):
                method([[1], [2], [3], [4], [999]], GREEDY)
        assert infer.collect() == {}
        assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "still"))

        infer.pause("keep")
        numbers = infer.submit([[3]] * 5, [GREEDY | {"max_tokens": most} for most in (200, 40, 40, 40, 40)])
        ranks = [infer._router.placed[number][0] for number in numbers]
        assert ranks == [0, 1, 1, 1, 1], "by load, not by number"
        infer.resume()
        found: dict[int, Any] = {}
        while len(found) < 5:
            found |= infer.collect(timeout_s=60)
        assert [len(found[number].outputs[0].token_ids) for number in numbers] == [200, 40, 40, 40, 40]

        os.kill(infer.executors[0].workers[1].process_id, signal.SIGKILL)
        train.scale(1.05)
        with pytest.raises(RlcoreError, match=r"SIGKILL"):
            train.sync_weights(infer, timeout_s=60)
        infer.restart()
        train.sync_weights(infer)
        assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "two"))
