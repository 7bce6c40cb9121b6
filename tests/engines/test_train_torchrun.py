"""launcher="torchrun": the user's program runs on every rank, with the same batch; each trains on its share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.ops import ppo_clip

from .plain_training import assert_metrics
from .train_batches import packed_batch
from .train_policy import truth_of

PROGRAM = """
    import os, sys
    import torch
    import rlcore
    from rlcore.nn import HuggingFaceTrainModule
    from rlcore.ops import ppo_clip
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    folder, out = sys.argv[1:]
    size = int(os.environ["WORLD_SIZE"])
    batch = torch.load(f"{out}/batch.pt", weights_only=True)
    for workers in (1, size):
        with rlcore.meta_device():
            module = Policy.from_pretrained(folder)
        with rlcore.TrainEngine(module) as engine:
            engine.build(devices=[f"cpu:{rank}" for rank in range(workers)], data_parallel_size=workers,
                         launcher="torchrun")
            metrics = [engine.train_batch(batch, ppo_clip()) for _ in range(2)]
            engine.save(f"{out}/checkpoint-{workers}-{os.environ['RANK'] if workers == 1 else 'all'}")
            found = {"metrics": metrics, "logprobs": engine.forward_logprobs(batch), "state": engine.state_dict()}
        torch.save(found, f"{out}/{workers}-{os.environ['RANK']}.pt")
"""


@pytest.mark.slow
def test_every_rank_gets_the_results_of_the_whole_batch(
    policy: Any, qwen2_folder: Path, tmp_path: Path, torchrun: Callable[..., None]
) -> None:
    class Policy(policy):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    batch = packed_batch((12, 3, 7, 2, 19))
    torch.save(batch, tmp_path / "batch.pt")
    torchrun(PROGRAM, qwen2_folder, tmp_path)
    truth = truth_of(Policy, qwen2_folder)
    steps = [truth.step(batch, ppo_clip()) for _ in range(2)]
    for name in ("1-0", "1-1", "2-0", "2-1"):
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        for metrics, step in zip(found["metrics"], steps, strict=True):
            assert_metrics(metrics, *step)
        truth.assert_logprobs(found["logprobs"], batch)
        truth.assert_weights(found["state"])
    assert len(list((tmp_path / "checkpoint-2-all").glob("data-*/weights-*"))) == 2
