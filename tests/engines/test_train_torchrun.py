"""launcher="torchrun": the user's program runs on every rank, with the same batch; each trains on its share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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
    generator = torch.Generator().manual_seed(0)
    lengths = [12, 3, 7, 2, 9]
    batch = {
        "input_ids": torch.randint(21, (sum(lengths),), generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "old_logprobs": -torch.rand(sum(lengths), generator=generator) * 3,
        "advantages": torch.randn(len(lengths), generator=generator),
    }
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
    qwen2_folder: Path, tmp_path: Path, torchrun: Callable[..., None]
) -> None:
    torchrun(PROGRAM, qwen2_folder, tmp_path)
    alone = torch.load(tmp_path / "1-0.pt", weights_only=True)
    for rank in range(2):
        found = torch.load(tmp_path / f"2-{rank}.pt", weights_only=True)
        for metrics, expected in zip(found["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-6)
        torch.testing.assert_close(found["logprobs"], alone["logprobs"], rtol=1e-5, atol=1e-5)
        assert found["state"].keys() == alone["state"].keys()
        for name, tensor in alone["state"].items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-4, atol=2e-6)
    assert len(list((tmp_path / "checkpoint-2-all").glob("data-*/weights-*"))) == 2
