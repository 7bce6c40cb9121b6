"""Worker processes on NVIDIA GPUs: groups over NCCL, engines, and memory that a killed worker gives back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.executors.worker import Worker
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import UnsupportedError, WorkerDiedError
from rlcore.ops import ppo_clip
from tests.engines.train_policy import adamw_policy
from tests.model_rounding import logprob_rounding

GIB = 2**30


class Summer(Worker):
    """Adds over the group, and holds memory."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.context = context

    def total(self, value: torch.Tensor) -> torch.Tensor:
        tensor = value.to(self.device.torch_device)
        self.context.process_group(60.0)
        torch.distributed.all_reduce(tensor)
        torch.accelerator.synchronize()
        return tensor

    def hold(self, nbytes: int) -> int:
        self.held = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)
        return torch.accelerator.current_device_index()


def held_bytes(pids: Sequence[int]) -> list[int]:
    """The bytes that each of these processes has of its GPU, by the driver; others on the same GPUs change nothing.

    It is empty where the driver does not say, or knows the processes by other numbers, as in some containers.
    """
    try:
        found = [rlcore.get_device(f"cuda:{index}").processes() for index in range(len(pids))]
    except UnsupportedError:
        return []
    each = zip(pids, found, strict=True)
    held = [sum(process.used_bytes or 0 for process in of if process.pid == pid) for pid, of in each]
    return held if any(held) else []


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=pytest.mark.gpu),
        pytest.param(2, marks=pytest.mark.multigpu),
        pytest.param(4, marks=pytest.mark.multigpu),
    ],
)
def test_workers_add_over_nccl_and_a_killed_one_frees_its_gpu(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, found {torch.cuda.device_count()}")
    names = [f"cuda:{index}" for index in range(world_size)]
    group = start_workers(Summer, "the test engine", names, launcher="process", timeout_s=120.0)
    try:
        values = [torch.full((1 << 20,), float(rank + 1)) for rank in range(world_size)]
        totals = group.call("total", [((value,), {}) for value in values])
        expected = sum(range(1, world_size + 1))
        assert all(bool((total == expected).all()) for total in totals)
        assert group.call("hold", [((4 * GIB,), {})] * world_size) == list(range(world_size))
        pids = [worker.process_id for worker in group.workers]
        held = held_bytes(pids)
        assert not held or min(held) > 4 * GIB
        group.workers[-1].kill("the test says so")
        with pytest.raises(
            WorkerDiedError,
            match=rf"rank {world_size - 1} \(cuda:{world_size - 1}\) was ended because the test says so",
        ):
            group.call("hold", [((1,), {})] * world_size)
    finally:
        group.stop()
    deadline = time.monotonic() + 60.0
    while held_bytes(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not held_bytes(pids), "a GPU was not given back"


@pytest.mark.gpu
def test_trainer_and_sampler_share_a_gpu_in_one_worker_process(qwen2_folder: Path) -> None:
    from transformers import Qwen2ForCausalLM

    with rlcore.meta_device():
        module = adamw_policy(Qwen2ForCausalLM, lr=1e-2).from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(qwen2_folder) as infer:
        train.build(devices="cuda:0", launcher="process")
        infer.build(colocate_with=train, launcher="process")
        outputs = infer.generate(["1+1=", "20+"], {"n": 4, "max_tokens": 8, "seed": 0})
        batch: dict[str, Any] = rlcore.collate(outputs, advantages=torch.linspace(-1, 1, 8))
        infer.meta()
        difference = (train.forward_logprobs(batch) - batch["old_logprobs"]).abs().max()
        assert difference <= logprob_rounding(qwen2_folder, batch["input_ids"].shape[1]), "in float32 on both sides"
        train.train_batch(batch, ppo_clip())
        (moved,) = train.offload("optimizer", "grads")["optimizer"]
        assert moved.moved_bytes > 0
        infer.onload("weights")
        assert train.sync_weights(infer).version == 1
        infer.onload("kv_cache")
        assert infer.generate(["1+1="], {"temperature": 0})[0].outputs[0].version_spans[0].version == 1
